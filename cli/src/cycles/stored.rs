//! Files of these commands: JSON objects, keyed by name.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

use anyhow::Context;
use harvestfs_protocol::durable;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Reads a file; the result is empty if the file does not exist.
///
/// # Errors
/// When it cannot be read, or has other content.
pub fn load<T: DeserializeOwned>(path: &Path) -> anyhow::Result<BTreeMap<String, T>> {
    let shown = path.display();
    match fs::read(path) {
        Ok(text) => serde_json::from_slice(&text).with_context(|| format!("{shown} is damaged")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(error).with_context(|| format!("cannot read {shown}")),
    }
}

/// Replaces the content of a file, which only its owner can access.
///
/// # Errors
/// When it cannot be written.
pub fn store<T: Serialize>(path: &Path, content: &BTreeMap<String, T>) -> anyhow::Result<()> {
    let text = serde_json::to_vec_pretty(content)?;
    Ok(durable::replace_file(path, &text, 0o600)?)
}
