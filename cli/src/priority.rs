//! Yields to the owner's processes, by means that the kernel provides.

#![allow(unsafe_code, reason = "libc has calls that rustix has not")]

use crate::config::Priority;

/// The nice value with the lowest priority.
const NICE_MAX: i32 = 19;

/// Lowers the priority of this thread and all that it starts. What the kernel refuses is logged: then only
/// denial protects the owner.
pub fn apply(priority: Priority) {
    let nice = || rustix::process::setpriority_process(None, NICE_MAX).map_err(Into::into);
    let results = match priority {
        Priority::Normal => return,
        Priority::Low => vec![
            ("nice", nice()),
            ("I/O priority", io_priority(IoClass::BestEffort, 7)),
        ],
        Priority::Idle => vec![
            // In case the kernel or a limit refuses the calls below.
            ("nice", nice()),
            ("SCHED_IDLE", idle_scheduling()),
            ("I/O priority", io_priority(IoClass::Idle, 7)),
        ],
    };
    for (what, result) in results {
        if let Err(error) = result {
            tracing::warn!(%error, "{what} cannot be lowered");
        }
    }
}

/// Classes of I/O priority, as the kernel numbers them.
#[derive(Clone, Copy)]
enum IoClass {
    BestEffort = 2,
    Idle = 3,
}

fn idle_scheduling() -> std::io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread; `parameters` is a valid structure that the call only reads.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &parameters) };
    check(result.into())
}

fn io_priority(class: IoClass, level: libc::c_long) -> std::io::Result<()> {
    const WHO_PROCESS: libc::c_long = 1;
    const CLASS_SHIFT: u32 = 13;
    let value = ((class as libc::c_long) << CLASS_SHIFT) | level;
    // SAFETY: the call takes three integers and no pointer; 0 is the calling thread.
    let result =
        unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0 as libc::c_long, value) };
    check(result)
}

fn check(result: libc::c_long) -> std::io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_takes_it() {
        // Only affects the thread of this test.
        std::thread::spawn(|| {
            apply(Priority::Low);
            assert_eq!(
                rustix::process::getpriority_process(None).unwrap(),
                NICE_MAX
            );
            apply(Priority::Idle);
            // SAFETY: takes an integer; 0 is the calling thread.
            let policy = unsafe { libc::sched_getscheduler(0) };
            assert_eq!(policy, libc::SCHED_IDLE);
        })
        .join()
        .unwrap();
    }
}
