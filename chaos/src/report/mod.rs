//! Tables, CSV files and plots of what was simulated, beside what the paper states.

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
    /// What was measured; `None` when the runs do not tell.
    pub measured: Option<String>,
    /// Whether it holds.
    pub holds: bool,
}

/// The statements as a table; those of which the runs tell nothing are left out.
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
