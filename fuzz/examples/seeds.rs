//! Writes the seeds of all targets to `corpus/<target>/`, where cargo-fuzz looks for them.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (target, _) in harvestfs_fuzz::TARGETS {
        let directory = corpus.join(target);
        std::fs::create_dir_all(&directory)?;
        for (number, seed) in harvestfs_fuzz::seeds::of(target).iter().enumerate() {
            std::fs::write(directory.join(format!("seed-{number:02}")), seed)?;
        }
    }
    println!("wrote the seeds to {}", corpus.display());
    Ok(())
}
