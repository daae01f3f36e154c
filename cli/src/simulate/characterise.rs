//! `harvestfs simulate characterise`.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use harvestfs_chaos::datacentre::{MONTH_S, MONTHS};
use harvestfs_chaos::report::characterise::{plots, statements, table};
use harvestfs_chaos::simulate::characterise::characterise;

use super::{DatacentreArgs, print_statements, records_json, write_file};

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    harvestfs simulate characterise --plots figures")]
pub struct CharacteriseArgs {
    #[command(flatten)]
    datacentres: DatacentreArgs,
    /// Write every record to this file, as one JSON array.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the table to this file.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write the plots, figures 1 to 6 of the paper, into this directory.
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
}

pub fn run(args: &CharacteriseArgs) -> anyhow::Result<()> {
    let mut characters = Vec::new();
    for name in args.datacentres.names()? {
        let datacentre = args.datacentres.load(&name, u64::from(MONTHS) * MONTH_S)?;
        characters.push(characterise(&datacentre));
    }
    println!("{}", table(&characters));
    print_statements(&statements(&characters));
    if let Some(file) = &args.json {
        write_file(file, &records_json(&characters)?)?;
    }
    if let Some(file) = &args.csv {
        write_file(file, &table(&characters).to_csv())?;
    }
    if let Some(directory) = &args.plots {
        std::fs::create_dir_all(directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
        for (name, plot) in plots(&characters) {
            write_file(&directory.join(name), &plot)?;
        }
    }
    Ok(())
}
