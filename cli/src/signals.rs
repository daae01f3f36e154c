//! Signals that end a command.

/// Ends this process as the signal would have. Ctrl-C ends a loop of a shell only if it killed the command in it: one
/// that exits has made something else of it.
pub fn end_by(signal: i32) -> ! {
    // It fails only if it does not know the signal.
    let _ = signal_hook::low_level::emulate_default_handler(signal);
    std::process::exit(128 + signal)
}
