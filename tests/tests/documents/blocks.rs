//! The code blocks of a document.

use std::fs;
use std::path::Path;

/// A code block.
#[derive(Debug)]
pub struct Block {
    /// Document and line of the block, for messages.
    pub place: String,
    /// The text after the opening fence; empty for an indented block.
    pub label: String,
    pub lines: Vec<String>,
}

impl Block {
    /// The machines on which its commands are run, empty for the cluster of `harvestfs up`; `None` if they
    /// are not run.
    pub fn machines(&self) -> Option<Vec<&str>> {
        let machines = self.label.strip_prefix("sh run")?;
        Some(machines.split_whitespace().collect())
    }

    pub fn script(&self) -> String {
        self.lines.join("\n") + "\n"
    }
}

/// The blocks of a document, given by its path in the repository, in order.
pub fn blocks_of(document: &str) -> Vec<Block> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .join(document);
    let text = fs::read_to_string(path).expect("the document");
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    let mut before = "";
    for (number, line) in (1..).zip(text.lines()) {
        let is_fenced = open.as_ref().is_some_and(|block| !block.label.is_empty());
        let start = |label: &str| Block {
            place: format!("{document}:{number}"),
            label: label.to_owned(),
            lines: Vec::new(),
        };
        if is_fenced {
            if line == "```" {
                blocks.extend(open.take());
            } else if let Some(block) = &mut open {
                block.lines.push(line.to_owned());
            }
        } else if let Some(label) = line.strip_prefix("```") {
            blocks.extend(open.take());
            open = Some(start(if label.is_empty() { "text" } else { label }));
        } else if let Some(content) = line.strip_prefix("    ")
            && (open.is_some() || before.is_empty())
        {
            let block = open.get_or_insert_with(|| start(""));
            block.lines.push(content.to_owned());
        } else {
            blocks.extend(open.take());
        }
        before = line;
    }
    let unfinished = open.as_ref().filter(|block| !block.label.is_empty());
    assert!(unfinished.is_none(), "{unfinished:?} does not end");
    blocks.extend(open);
    blocks
}
