//! How a request is served: on the thread that read it as far as it need not wait, then in a task.

use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Waker};

use fuser::{FileHandle, INodeNo, ReplyEmpty, ReplyEntry, Request};
use harvestfs_client::{Client, ClientError};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::types::{Attr, Credentials};
use tokio::runtime::Handle;

use crate::caller::{Caller, Looks};
use crate::credentials::Callers;
use crate::handles::Handles;
use crate::inner::{Inner, OpenFile};
use crate::metrics::{Metrics, Observed, Operation};
use crate::pages::Waiter;
use crate::shared::Shared;
use crate::write_buffers::WriteBuffers;
use crate::{convert, reply};

/// Serves the kernel.
pub struct Adapter {
    /// What the requests work on.
    pub inner: Arc<Inner>,
    /// On whose behalf they are.
    pub callers: Callers,
    /// Whether they still live.
    pub looks: Arc<Looks>,
    /// What they write, until it is sent.
    pub write_buffers: Arc<WriteBuffers>,
    runtime: Handle,
}

impl Adapter {
    /// `runtime` runs what has to wait.
    pub fn new(
        client: Client,
        shared: Arc<Shared>,
        metrics: Arc<Metrics>,
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
            callers: Callers::default(),
            looks: Arc::default(),
            write_buffers: Arc::default(),
            runtime,
        }
    }

    /// Does the work on this thread as far as it need not wait, which is often to its end: handing
    /// it over costs more than most answers. A task goes on from there.
    pub fn serve(&self, operation: Operation, work: impl Future<Output = ()> + Send + 'static) {
        self.go_on(self.begin(operation), work);
    }

    /// A request begins.
    pub fn begin(&self, operation: Operation) -> Observed {
        self.inner.metrics.begin(operation)
    }

    /// As [`Adapter::serve`], for what was begun already.
    pub fn go_on(&self, observed: Observed, work: impl Future<Output = ()> + Send + 'static) {
        let work = observed.request().scope(async move {
            work.await;
            drop(observed);
        });
        let mut work = Box::pin(work);
        let _runtime = self.runtime.enter();
        // A wake-up before the task has it is not lost: the task begins with a poll.
        let first_look = work.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        if first_look.is_pending() {
            self.runtime.spawn(work);
        }
    }

    /// The client to ask, and on whose behalf.
    pub fn asked(
        &self,
        request: &Request,
    ) -> (Client, impl Future<Output = Credentials> + Send + use<>) {
        let credentials = self.callers.credentials(request);
        (self.inner.client.clone(), credentials)
    }

    /// What a request works on, and on whose behalf.
    pub fn context(
        &self,
        request: &Request,
    ) -> (
        Arc<Inner>,
        impl Future<Output = Credentials> + Send + use<>,
        Caller,
    ) {
        let credentials = self.callers.credentials(request);
        (self.inner.clone(), credentials, self.caller(request))
    }

    /// The inode that a request is of, for which a thread waits; see [`Shared::heard_from`].
    pub fn asked_of(&self, request: &Request, node_id: INodeNo) -> InodeId {
        let ino = convert::inode(node_id);
        self.inner.shared.heard_from(ino, request.pid());
        ino
    }

    /// The thread that made a request.
    pub fn caller(&self, request: &Request) -> Caller {
        Caller::new(request.pid(), self.looks.clone())
    }

    /// Answers with the entry that `work` makes.
    pub fn entry(
        &self,
        request: &Request,
        operation: Operation,
        reply: ReplyEntry,
        work: impl Future<Output = Result<Attr, ClientError>> + Send + 'static,
    ) {
        let (inner, caller) = (self.inner.clone(), self.caller(request));
        let asked_at = inner.shared.invalidations.count();
        // `link` does; nothing else is of an inode that the kernel has.
        let waiter = Some(Waiter::locking(request.pid()));
        self.serve(operation, async move {
            let made = caller.unless_killed(work).await;
            inner.answer_entry(reply, made, asked_at, waiter).await;
        });
    }

    /// Answers whether `work` succeeded.
    pub fn empty(
        &self,
        request: &Request,
        operation: Operation,
        reply: ReplyEmpty,
        work: impl Future<Output = Result<(), ClientError>> + Send + 'static,
    ) {
        let caller = self.caller(request);
        self.serve(operation, async move {
            reply::empty(reply, caller.unless_killed(work).await);
        });
    }

    /// The open file, or EBADF.
    pub fn file(&self, handle: FileHandle) -> Option<Arc<OpenFile>> {
        self.inner.files.get(handle.0)
    }
}
