//! Configuration files.

use harvestfs_protocol::settings::SettingsError;

use crate::config::{self, ClientConfig, DatanodeConfig, NamenodeConfig};
use crate::scratch;

/// The first byte selects the configuration that the rest represents. Each error must name the file.
pub fn config_files(input: &[u8]) {
    let Some((kind, text)) = input.split_first() else {
        return;
    };
    let path = scratch().join("configuration.toml");
    crate::put(&path, text);
    let error = match kind % 3 {
        0 => config::load::<NamenodeConfig>(&path).map(drop).err(),
        1 => config::load::<DatanodeConfig>(&path).map(drop).err(),
        _ => config::load::<ClientConfig>(&path).map(drop).err(),
    };
    if let Some(error) = error {
        assert!(error.downcast_ref::<SettingsError>().is_some());
        assert!(error.to_string().contains("configuration.toml"));
    }
}
