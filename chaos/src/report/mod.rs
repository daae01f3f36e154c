//! Tables, CSV files and plots of simulations, compared with what the paper states.

pub mod availability;
pub mod characterise;
pub mod durability;
mod svg;
mod table;

pub use svg::{Axis, Bars, Lines, Series};
pub use table::Table;

/// A statement of the paper, or an aim of this project, and what was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Statement {
    /// What is stated.
    pub stated: String,
    /// What was measured; `None` if the runs do not cover it.
    pub measured: Option<String>,
    /// Whether it holds.
    pub holds: bool,
}

/// The statements as a table, without those that the runs do not cover.
#[must_use]
pub fn statements_table(statements: &[Statement]) -> Table {
    let mut table = Table::new(&["stated", "measured", ""]);
    for statement in statements {
        if let Some(measured) = &statement.measured {
            let verdict = if statement.holds { "holds" } else { "MISSED" };
            table.row(&[statement.stated.as_str(), measured.as_str(), verdict]);
        }
    }
    table
}
