//! What the kernel says of this process.

/// What nobody is to be allowed of what is made: umask(2), which can only be asked for by changing it.
pub fn umask() -> u16 {
    // Where the kernel does not tell, nobody but the owner is let in.
    number(&status(), "Umask:", 8).map_or(0o077, |mask| (mask & 0o777) as u16)
}

/// Whether it ignores a signal.
pub fn ignores(signal: i32) -> bool {
    // Signals are numbered from 1.
    let is_set = |mask: u64| mask & (1 << (signal - 1)) != 0;
    number(&status(), "SigIgn:", 16).is_some_and(is_set)
}

fn status() -> String {
    std::fs::read_to_string("/proc/self/status").unwrap_or_default()
}

fn number(status: &str, name: &str, radix: u32) -> Option<u64> {
    let text = status.lines().find_map(|line| line.strip_prefix(name))?;
    u64::from_str_radix(text.trim(), radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_writes_numbers_behind_their_names() {
        let text = "Name:\tUmask:\nUmask:\t0027\nSigIgn:\t0000000000001002\n";
        assert_eq!(number(text, "Umask:", 8), Some(0o027));
        assert_eq!(number(text, "SigIgn:", 16), Some(0x1002));
        assert_eq!(number("", "Umask:", 8), None);
        assert!(number(&status(), "Umask:", 8).is_some());
    }
}
