//! The content of a store of checkpoints, and the messages that CRIU sends while it dumps.

use harvestfs_checkpoint::manifest::Manifest;
use harvestfs_checkpoint::page::PageTable;
use harvestfs_checkpoint::page_message::{Layout, Message};
use harvestfs_checkpoint::pagemap::PageMap;

/// The first byte selects the decoder of the rest. A decoded value must be unchanged by encoding and decoding it.
pub fn checkpoint_files(input: &[u8]) {
    let Some((kind, body)) = input.split_first() else {
        return;
    };
    match kind % 4 {
        0 => {
            if let Ok(manifest) = Manifest::decode(body) {
                let bytes = manifest.encode().expect("it was decoded");
                assert_eq!(Manifest::decode(&bytes).expect("it was encoded"), manifest);
            }
        }
        1 => {
            if let Ok(table) = PageTable::decode(body) {
                assert_eq!(table.encode(), body);
            }
        }
        2 => {
            if let Ok(map) = PageMap::decode(body) {
                assert_eq!(PageMap::decode(&map.encode()).as_ref(), Ok(&map));
                let pages: u64 = map
                    .runs()
                    .iter()
                    .filter_map(|run| map.find(run.address, run.pages))
                    .flatten()
                    .map(|(_, run)| run.pages)
                    .sum();
                assert_eq!(pages, map.image_pages());
            }
        }
        _ => {
            for layout in [Layout::Narrow, Layout::Wide] {
                // Any input may be refused or read.
                let _ = Message::decode(body, layout);
            }
        }
    }
}
