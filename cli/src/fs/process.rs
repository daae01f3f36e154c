//! What the kernel says of this process.

/// What nobody is to be allowed of what is made: umask(2), which can only be asked for by changing it.
pub fn umask() -> u16 {
    // Where the kernel does not tell, nobody but the owner is let in.
    umask_in(&status()).map_or(0o077, |mask| mask & 0o777)
}

fn status() -> String {
    std::fs::read_to_string("/proc/self/status").unwrap_or_default()
}

fn umask_in(status: &str) -> Option<u16> {
    let text = status
        .lines()
        .find_map(|line| line.strip_prefix("Umask:"))?;
    u16::from_str_radix(text.trim(), 8).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_writes_the_umask_behind_its_name() {
        let text = "Name:\tUmask:\nUmask:\t0027\n";
        assert_eq!(umask_in(text), Some(0o027));
        assert_eq!(umask_in(""), None);
        assert!(umask_in(&status()).is_some());
    }
}
