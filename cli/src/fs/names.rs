//! Prints names. Users choose them, and they can contain every byte except `/` and NUL.

use std::borrow::Cow;
use std::io::IsTerminal;
use std::sync::LazyLock;

use serde_json::{Value, json};

/// Whether standard output is a terminal, which interprets control characters.
static IS_TERMINAL: LazyLock<bool> = LazyLock::new(|| std::io::stdout().is_terminal());

/// The form in which a name or path is printed: unchanged, or on a terminal without control characters.
pub fn printed(name: &[u8]) -> Cow<'_, [u8]> {
    if *IS_TERMINAL {
        harmless(name).into_bytes().into()
    } else {
        name.into()
    }
}

/// Same as [`printed`], for a line of text.
pub fn text(name: &[u8]) -> String {
    String::from_utf8_lossy(&printed(name)).into_owned()
}

/// Replaces control characters and invalid UTF-8 with `?`, as `ls -q` does.
pub fn harmless(name: &[u8]) -> String {
    let mut shown = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        let letters = chunk.valid().chars();
        shown.extend(letters.map(|letter| if letter.is_control() { '?' } else { letter }));
        shown.extend(chunk.invalid().iter().map(|_| '?'));
    }
    shown
}

/// Adds a name or path to a JSON object: as text and, if that is lossy, also as hexadecimal digits in `KEY_bytes`.
pub fn insert(object: &mut Value, key: &str, name: &[u8]) {
    object[key] = json!(String::from_utf8_lossy(name));
    if str::from_utf8(name).is_err() {
        let digits: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
        object[format!("{key}_bytes")] = json!(digits);
    }
}

/// Formats JSON as one line. This also escapes DEL and the control characters after it, which JSON allows unescaped but
/// a terminal may interpret.
pub fn json_line(value: &Value) -> String {
    let mut line = String::new();
    for letter in value.to_string().chars() {
        if letter.is_control() {
            line.push_str(&format!("\\u{:04x}", u32::from(letter)));
        } else {
            line.push(letter);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_obeys_no_name() {
        assert_eq!(harmless("Größe 1.txt".as_bytes()), "Größe 1.txt");
        assert_eq!(harmless(b"\x1b]0;title\x07\r\n\x7f"), "?]0;title????");
        // The same escapes as one character, in UTF-8 and in older encodings.
        assert_eq!(harmless("\u{9b}2J".as_bytes()), "?2J");
        assert_eq!(harmless(b"a\x9b\xff2J"), "a??2J");
    }

    #[test]
    fn json_has_every_byte_of_a_name() {
        let mut object = json!({});
        insert(&mut object, "path", "/Größe".as_bytes());
        insert(&mut object, "origin", b"/a\xff\n");
        let expected = json!({
            "path": "/Größe",
            "origin": "/a\u{fffd}\n",
            "origin_bytes": "2f61ff0a",
        });
        assert_eq!(object, expected);
    }

    #[test]
    fn a_terminal_obeys_no_json() {
        let value = json!({ "path": "Größe\u{9b}2J\x1b\x7f\n" });
        let line = json_line(&value);
        assert_eq!(line, r#"{"path":"Größe\u009b2J\u001b\u007f\n"}"#);
        assert_eq!(serde_json::from_str::<Value>(&line).unwrap(), value);
    }
}
