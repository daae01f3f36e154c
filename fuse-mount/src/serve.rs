//! Serving a request: on the thread that read it as far as possible without waiting, then in a task.

use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Waker};

use fuser::FileHandle;
use harvestfs_client::{Client, ClientError};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::types::{Attr, Credentials};
use tokio::runtime::Handle;

use crate::caller::{Caller, Looks, Processes};
use crate::credentials::Callers;
use crate::handles::Handles;
use crate::inner::{Inner, OpenFile};
use crate::metrics::{Metrics, Observed, Operation};
use crate::pages::Waiter;
use crate::reply::{self, Entry, Reply};
use crate::shared::Shared;
use crate::write_buffers::WriteBuffers;

/// The thread on whose behalf the kernel makes a request.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its id, as the mount sees it; 0 for the kernel itself, or for a thread that the mount does not see.
    pub pid: u32,
}

/// Serves the kernel.
pub struct Adapter {
    /// The state that requests work on.
    pub(crate) inner: Arc<Inner>,
    /// The credentials of the callers.
    pub(crate) callers: Callers,
    /// Checks whether callers are still alive.
    pub(crate) looks: Arc<Looks>,
    /// Buffers for written data until it is sent.
    pub(crate) write_buffers: Arc<WriteBuffers>,
    runtime: Handle,
}

impl Adapter {
    /// Creates an adapter. `processes` are those that use the mount; `runtime` runs work that has to wait.
    pub(crate) fn new(
        client: Client,
        shared: Arc<Shared>,
        metrics: Arc<Metrics>,
        processes: Arc<dyn Processes>,
        runtime: Handle,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                client,
                shared,
                metrics,
                files: Handles::new(),
                directories: Handles::new(),
            }),
            callers: Callers::new(processes.clone()),
            looks: Arc::new(Looks::new(processes)),
            write_buffers: Arc::default(),
            runtime,
        }
    }

    /// Does the work on this thread as far as possible without waiting, which is often to its end: handing it over
    /// costs more than most answers. A task continues from there.
    pub(crate) fn serve(
        &self,
        operation: Operation,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        self.go_on(self.begin(operation), work);
    }

    /// Starts to measure a request.
    pub(crate) fn begin(&self, operation: Operation) -> Observed {
        self.inner.metrics.begin(operation)
    }

    /// As [`Adapter::serve`], for a request that is already being measured.
    pub(crate) fn go_on(
        &self,
        observed: Observed,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        let work = observed.request().scope(async move {
            work.await;
            drop(observed);
        });
        let mut work = Box::pin(work);
        let _runtime = self.runtime.enter();
        // A wake-up before the task owns the future is not lost: the task begins with a poll.
        let first_look = work.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        if first_look.is_pending() {
            self.runtime.spawn(work);
        }
    }

    /// The client, and the credentials of the caller.
    pub(crate) fn asked(
        &self,
        header: Header,
    ) -> (Client, impl Future<Output = Credentials> + Send + use<>) {
        let credentials = self.callers.credentials(header);
        (self.inner.client.clone(), credentials)
    }

    /// The state that a request works on, the credentials of the caller, and the caller itself.
    pub(crate) fn context(
        &self,
        header: Header,
    ) -> (
        Arc<Inner>,
        impl Future<Output = Credentials> + Send + use<>,
        Caller,
    ) {
        let credentials = self.callers.credentials(header);
        (self.inner.clone(), credentials, self.caller(header))
    }

    /// Records that a thread makes a request for an inode and waits for the answer; see [`Shared::heard_from`].
    pub(crate) fn heard_from(&self, header: Header, ino: InodeId) {
        self.inner.shared.heard_from(ino, header.pid);
    }

    /// The thread that made a request.
    pub(crate) fn caller(&self, header: Header) -> Caller {
        Caller::new(header.pid, self.looks.clone())
    }

    /// Answers with the entry that `work` makes.
    pub(crate) fn entry(
        &self,
        header: Header,
        operation: Operation,
        reply: impl Reply<Entry>,
        work: impl Future<Output = Result<Attr, ClientError>> + Send + 'static,
    ) {
        let (inner, caller) = (self.inner.clone(), self.caller(header));
        let asked_at = inner.shared.invalidations.count();
        // Relevant for `link` only: no other of these requests concerns an inode that the kernel already knows.
        let waiter = Some(Waiter::locking(header.pid));
        self.serve(operation, async move {
            let made = caller.unless_killed(work).await;
            inner.answer_entry(reply, made, asked_at, waiter).await;
        });
    }

    /// Answers whether `work` succeeded.
    pub(crate) fn empty(
        &self,
        header: Header,
        operation: Operation,
        reply: impl Reply<()>,
        work: impl Future<Output = Result<(), ClientError>> + Send + 'static,
    ) {
        let caller = self.caller(header);
        self.serve(operation, async move {
            reply::send(reply, caller.unless_killed(work).await);
        });
    }

    /// The open file, or EBADF.
    pub(crate) fn file(&self, handle: FileHandle) -> Option<Arc<OpenFile>> {
        self.inner.files.get(handle.0)
    }
}
