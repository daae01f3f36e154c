//! Handling of broken invariants. A task or thread that panics would end alone, and the others would continue with
//! what it left half done. So the process stops, and its supervisor starts it again from its durable state.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::process;
use std::thread;

use rustix::process::{DumpableBehavior, set_dumpable_behavior};

thread_local! {
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// Makes each panic end the process with `SIGABRT`, after the message, unless it is [`contained`].
///
/// There is no core dump: it would contain keys and user data. Besides, the kernel first stops all threads for it,
/// and waits forever if one of them waits in the kernel for this process: a mount would neither end nor be recognised
/// as dead.
pub fn stop_on_panic() {
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        report(info);
        if !CONTAINED.get() {
            // It fails only where the process cannot be dumped anyway.
            let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
            process::abort();
        }
    }));
}

/// Runs a closure that may panic without harm to the rest: what it worked on is then discarded.
///
/// # Errors
/// The panic of the closure.
pub fn contained<T>(work: impl FnOnce() -> T) -> thread::Result<T> {
    let before = CONTAINED.replace(true);
    let done = panic::catch_unwind(AssertUnwindSafe(work));
    CONTAINED.set(before);
    done
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    const CHILD: &str = "HARVESTFS_TEST_PANICS";

    /// A thread panics while the first one waits for something that never happens.
    #[test]
    fn a_panic_of_any_thread_ends_the_process() {
        if env::var_os(CHILD).is_some() {
            stop_on_panic();
            assert!(contained(|| panic!("this one is contained")).is_err());
            let broken = thread::spawn(|| panic!("this one is not"));
            let _ = broken.join();
            process::exit(0);
        }
        let test = env::current_exe().unwrap();
        let name = "panics::tests::a_panic_of_any_thread_ends_the_process";
        let output = Command::new(test)
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(6), "{said}");
        assert!(said.contains("this one is not"), "{said}");
    }

    #[test]
    fn what_is_contained_gives_its_result_or_says_that_it_panicked() {
        assert_eq!(contained(|| 7).ok(), Some(7));
        assert!(contained(|| panic!("as tested")).is_err());
        assert!(!CONTAINED.get());
    }
}
