//! All results of the five papers: `lab/repro/ID.toml`, with the module of its runner.

use super::experiment::row_file::ResultRow;
use std::sync::LazyLock;

/// The files of the rows, in this order.
macro_rules! files {
    ($($id:literal)*) => {
        &[$((
            concat!($id, ".toml"),
            include_str!(concat!("../../../repro/", $id, ".toml")),
        )),*]
    };
}

/// Name and text of every row's file, paper by paper.
const FILES: &[(&str, &str)] = files![
    "C1" "C2" "C3" "C4a" "C4b" "C4c" "C5" "C6" "C7" "C8" "C9" "C10" "C11"
    "M1" "M2"
    "D1" "D2"
    "E1" "E2" "E3"
    "S1" "S2" "S3" "S4" "S5"
    "video" "two-paths" "readycast-week" "readycast-learning"
];

static ROWS: LazyLock<Vec<ResultRow>> = LazyLock::new(|| {
    let row = |(file, text): &(&str, &str)| match ResultRow::parse(file, text) {
        Ok(row) => row,
        Err(fault) => panic!("a row of this program: {fault:#}"),
    };
    FILES.iter().map(row).collect()
});

/// All results, paper by paper.
///
/// # Panics
/// If a file built into this program is not a valid row, which a test checks.
pub fn all() -> &'static [ResultRow] {
    &ROWS
}

/// The row with this id, in upper or lower case.
pub fn find(id: &str) -> Option<&'static ResultRow> {
    all().iter().find(|row| row.id.eq_ignore_ascii_case(id))
}

#[cfg(test)]
mod tests {
    use super::{FILES, all, find};
    use std::path::Path;

    #[test]
    fn every_file_of_the_folder_is_a_row_of_its_name() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../repro");
        let mut there: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        there.sort();
        let mut known: Vec<&str> = FILES.iter().map(|(file, _)| *file).collect();
        known.sort_unstable();
        assert_eq!(there, known);
        for (row, (file, _)) in all().iter().zip(FILES) {
            assert_eq!(format!("{}.toml", row.id), **file);
        }
    }

    #[test]
    fn rows_are_found_in_either_case() {
        assert_eq!(find("c4A").map(|row| row.id.as_str()), Some("C4a"));
        assert!(find("C99").is_none());
    }
}
