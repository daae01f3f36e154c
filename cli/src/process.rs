//! Properties of this process, as reported by the kernel.

use tokio::signal::unix::SignalKind;

/// The umask of this process, read from `/proc` because umask(2) returns it only when changing it.
pub fn umask() -> u16 {
    number_in(&status(), "Umask:", 8)
        .and_then(|mask| u16::try_from(mask & 0o777).ok())
        // If the kernel does not report it, only the owner gets access.
        .unwrap_or(0o077)
}

/// Whether a signal is ignored.
pub fn ignores(kind: SignalKind) -> bool {
    // Signals are numbered from 1.
    let bit = 1_u64 << (kind.as_raw_value() - 1);
    number_in(&status(), "SigIgn:", 16).is_some_and(|mask| mask & bit != 0)
}

fn status() -> String {
    std::fs::read_to_string("/proc/self/status").unwrap_or_default()
}

fn number_in(status: &str, field: &str, radix: u32) -> Option<u64> {
    let text = status.lines().find_map(|line| line.strip_prefix(field))?;
    u64::from_str_radix(text.trim(), radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_writes_the_umask_behind_its_name() {
        let text = "Name:\tUmask:\nUmask:\t0027\n";
        let umask_in = |text| number_in(text, "Umask:", 8);
        assert_eq!(umask_in(text), Some(0o027));
        assert_eq!(umask_in(""), None);
        assert!(umask_in(&status()).is_some());
    }
}
