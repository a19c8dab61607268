//! Tables of figures for people, as plain text.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};

/// Blanks between two columns.
const GAP: u16 = 2;

/// A table without lines: names to the left in the first column, figures to the right in the others.
///
/// ```
/// use cedos_lab_scenario::TextTable;
/// let mut table = TextTable::new(["", "Mb/s", "drops"]);
/// table.row(["cubic", "9.5", "12"]);
/// table.row(["bbr", "10.25", "3"]);
/// assert_eq!(table.to_text(), "        Mb/s  drops\ncubic    9.5     12\nbbr    10.25      3");
/// ```
#[derive(Debug)]
pub struct TextTable {
    table: Table,
    /// The number of columns at the end that contain words, which go to the left.
    notes: usize,
}

impl TextTable {
    /// A table with these headings, and no rows yet.
    pub fn new<T: ToString>(headings: impl IntoIterator<Item = T>) -> TextTable {
        let mut table = Table::new();
        table.load_style(NOTHING);
        table.set_header(headings.into_iter().map(|heading| heading.to_string()));
        TextTable { table, notes: 0 }
    }

    /// A table whose last column contains remarks.
    pub fn with_notes<T: ToString>(headings: impl IntoIterator<Item = T>) -> TextTable {
        TextTable {
            notes: 1,
            ..TextTable::new(headings)
        }
    }

    /// Adds a row.
    pub fn row<T: ToString>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.table
            .add_row(cells.into_iter().map(|cell| cell.to_string()));
    }

    /// The lines of the table, without blanks at their ends.
    pub fn to_text(mut self) -> String {
        let figures = self.table.column_count().saturating_sub(self.notes);
        for (n, column) in self.table.column_iter_mut().enumerate() {
            column.set_padding((if n == 0 { 0 } else { GAP }, 0));
            if (1..figures).contains(&n) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        self.table.trim_fmt()
    }
}
