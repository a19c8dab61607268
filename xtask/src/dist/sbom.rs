//! Bills of materials in CycloneDX, by cargo-cyclonedx: one for each program and library that is shipped.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::context::{DistContext, call};
use super::tools::DistTool;
use crate::repository::{files_below, root};

/// The folder of each shipped crate, and the name of its product.
const DESCRIBED: [(&str, &str); 4] = [
    ("apps/cedos", "cedos"),
    ("lab/cli", "cedos-lab"),
    ("edge/capi", "libd2tp"),
    ("bindings/node", "d2tp-node"),
];

/// Writes the bills of materials anew.
pub fn make(context: &DistContext) -> Result<()> {
    context.tools.need(DistTool::CargoCyclonedx)?;
    // The tool writes a file beside the manifest of every crate, so the name must be unique.
    let stem = format!("dist-sbom-{}", std::process::id());
    let mut describe = Command::new(
        context
            .tools
            .find("cargo-cyclonedx")
            .context("cargo-cyclonedx")?,
    );
    describe.args([
        "cyclonedx",
        "--format",
        "json",
        "--spec-version",
        "1.5",
        "--no-build-deps",
    ]);
    describe.args(["-qq", "--override-filename", &stem]);
    describe.current_dir(root());
    describe.env("SOURCE_DATE_EPOCH", context.epoch.to_string());
    let described = call(&mut describe);
    let moved = DESCRIBED.iter().try_for_each(|(folder, name)| {
        let from = root().join(folder).join(format!("{stem}.json"));
        let text = std::fs::read_to_string(&from)
            .with_context(|| format!("no bill of materials {}", from.display()))?;
        std::fs::write(file(context, name), without_place(&text, &root()))?;
        Ok(())
    });
    for left in files_below(&root(), "json")? {
        if left.file_stem().is_some_and(|name| *name == *stem) {
            std::fs::remove_file(left)?;
        }
    }
    described.and(moved)
}

/// The bill of materials of `cedos`, which is made if it does not exist.
pub fn of_program(context: &DistContext) -> Result<PathBuf> {
    let file = file(context, "cedos");
    if !file.is_file() {
        make(context)?;
    }
    Ok(file)
}

fn file(context: &DistContext, name: &str) -> PathBuf {
    context
        .out
        .join(format!("{name}-{}.cdx.json", context.version))
}

/// The text without the path of the repository on this machine.
fn without_place(text: &str, root: &Path) -> String {
    text.replace(&format!("file://{}", root.display()), "file:///cedos")
}

#[cfg(test)]
mod tests {
    use super::without_place;
    use std::path::Path;

    #[test]
    fn a_bill_of_materials_does_not_say_where_it_was_made() {
        let text = r#"{"bom-ref": "path+file:///home/someone/cedos/core/time#d2tp-time@0.1.0"}"#;
        let made = without_place(text, Path::new("/home/someone/cedos"));
        assert_eq!(
            made,
            r#"{"bom-ref": "path+file:///cedos/core/time#d2tp-time@0.1.0"}"#
        );
    }
}
