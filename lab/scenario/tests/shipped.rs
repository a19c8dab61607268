//! Tests of the scenario files in the repository.

use cedos_lab_scenario::Scenario;
use std::path::Path;

#[test]
fn every_scenario_in_the_repository_can_be_read_and_has_expectations() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios");
    let mut read = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let scenario = Scenario::load(&path).unwrap_or_else(|fault| panic!("{fault}"));
        assert!(
            scenario.timeline().count() >= scenario.links.len(),
            "{}",
            path.display()
        );
        assert!(!scenario.expectations.is_empty(), "{}", path.display());
        read += 1;
    }
    assert!(read > 0);
}
