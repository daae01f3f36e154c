//! Tables as text and as CSV.

use std::fmt;

/// A table of texts. Columns whose cells are numbers are aligned to the right.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table without rows.
    #[must_use]
    pub fn new(header: &[&str]) -> Self {
        Self {
            header: header.iter().map(|&cell| cell.to_owned()).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row; cells beyond the header are left out, missing ones are empty.
    pub fn row<S: AsRef<str>>(&mut self, cells: &[S]) {
        let mut row: Vec<String> = cells.iter().map(|it| it.as_ref().to_owned()).collect();
        row.resize(self.header.len(), String::new());
        self.rows.push(row);
    }

    /// Whether there is no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the table as CSV, with the header. Cells with commas, quotes or line breaks are quoted.
    #[must_use]
    pub fn to_csv(&self) -> String {
        let quoted = |cell: &String| {
            if cell.contains([',', '"', '\n']) {
                format!("\"{}\"", cell.replace('"', "\"\""))
            } else {
                cell.clone()
            }
        };
        let mut text = String::new();
        for row in std::iter::once(&self.header).chain(&self.rows) {
            let cells: Vec<String> = row.iter().map(quoted).collect();
            text.push_str(&cells.join(","));
            text.push('\n');
        }
        text
    }
}

fn is_number(cell: &str) -> bool {
    cell.starts_with(|first: char| first.is_ascii_digit() || first == '-')
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cells = |column: usize| self.rows.iter().map(move |row| &row[column]);
        for (number, row) in std::iter::once(&self.header).chain(&self.rows).enumerate() {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let widths = cells(column).chain([&self.header[column]]);
                let width = widths.map(|it| it.chars().count()).max().unwrap_or(0);
                let right = cells(column).all(|it| it.is_empty() || is_number(it));
                line += &if right {
                    format!("{cell:>width$}  ")
                } else {
                    format!("{cell:<width$}  ")
                };
            }
            writeln!(f, "{}", line.trim_end())?;
            if number == 0 {
                let length = line.trim_end().chars().count();
                writeln!(f, "{}", "-".repeat(length))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_to_the_right_and_csv_is_quoted() {
        let mut table = Table::new(&["name", "lost"]);
        table.row(&["a, b", "7"]);
        table.row(&["c", "12"]);
        let text = "name  lost\n----------\na, b     7\nc       12\n";
        assert_eq!(table.to_string(), text);
        assert_eq!(table.to_csv(), "name,lost\n\"a, b\",7\nc,12\n");
    }
}
