//! The quota is never exceeded, as the file system counts it.

use std::os::unix::fs::MetadataExt;

use proptest::prelude::*;

use super::*;

/// What `du` says.
fn allocated_bytes(path: &Path) -> u64 {
    let metadata = std::fs::symlink_metadata(path).unwrap();
    let own = metadata.blocks() * 512;
    if !metadata.is_dir() {
        return own;
    }
    let entries = std::fs::read_dir(path).unwrap();
    own + entries
        .map(|entry| allocated_bytes(&entry.unwrap().path()))
        .sum::<u64>()
}

#[derive(Clone, Debug)]
enum Step {
    Create,
    Append(usize, usize, bool),
    Seal(usize),
    Close(usize),
    Delete(usize),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Create),
        8 => (any::<usize>(), 1_usize..1_000_000, any::<bool>())
            .prop_map(|(which, bytes, sync)| Step::Append(which, bytes, sync)),
        2 => any::<usize>().prop_map(Step::Seal),
        1 => any::<usize>().prop_map(Step::Close),
        2 => any::<usize>().prop_map(Step::Delete),
        1 => Just(Step::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn never_exceeded(quota_bytes in 0_u64..6_000_000, steps in prop::collection::vec(step(), 1..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run(quota_bytes, steps));
    }
}

async fn run(quota_bytes: u64, steps: Vec<Step>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("volume");
    let mut store = store_at(&path, quota_bytes, Arc::new(RealDisk));
    let overhead = allocated_bytes(&path);
    let mut writers: Vec<(u64, u64, BlockWriter)> = Vec::new();
    let mut known = Vec::new();
    for step in steps {
        match step {
            Step::Create => {
                let block = known.len() as u64 + 1;
                known.push(block);
                if let Ok(writer) = create(&store, block).await {
                    writers.push((block, 0, writer));
                }
            }
            Step::Append(which, bytes, sync) if !writers.is_empty() => {
                let index = which % writers.len();
                let (_, offset, writer) = &mut writers[index];
                let packet = packet(*offset, &vec![9; bytes], sync);
                match writer.write(vec![packet], sync).await {
                    Ok(()) => *offset += (bytes as u64).next_multiple_of(4096),
                    Err(StoreError::NoSpace | StoreError::OutOfOrder(_)) => {
                        writers.remove(index);
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            Step::Seal(which) if !writers.is_empty() => {
                let (_, length, writer) = writers.remove(which % writers.len());
                writer.seal(length).await.unwrap();
            }
            Step::Close(which) if !writers.is_empty() => {
                writers.remove(which % writers.len());
            }
            Step::Delete(which) if !known.is_empty() => {
                let block = known[which % known.len()];
                writers.retain(|(written, _, _)| *written != block);
                store.delete(BlockId(block)).await.unwrap();
            }
            Step::Restart => {
                writers.clear();
                drop(store);
                store = store_at(&path, quota_bytes, Arc::new(RealDisk));
            }
            _ => {}
        }
        let status = &store.status()[0];
        assert!(status.used_bytes <= quota_bytes);
        let allocated = allocated_bytes(&path);
        // A quota below what the directories take cannot make them smaller.
        assert!(
            allocated <= quota_bytes.max(overhead),
            "{allocated} of {quota_bytes}"
        );
        assert!(
            allocated <= status.used_bytes.max(overhead),
            "{allocated}, {status:?}"
        );
    }
}
