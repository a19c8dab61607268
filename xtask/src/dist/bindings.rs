//! Packages of libd2tp for other languages: a wheel, an npm package, a Go module.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::archive::tar_gz;
use super::context::{DistContext, call, copy, files_like, output};
use super::tools::DistTool;
use super::{compile, staging};
use crate::repository::root;

/// Go's name of the module: that of bindings/go/go.mod.
pub const GO_MODULE: &str = "github.com/cedos/cedos/bindings/go";

/// Makes a wheel with libd2tp, for any Python from 3.8. If auditwheel is installed, the wheel
/// declares the distributions on which it runs, as PyPI requires.
pub fn wheel(context: &DistContext) -> Result<()> {
    let built = compile::native(context)?;
    let source = context.scratch("wheel")?;
    let own = root().join("bindings/python");
    for file in [
        "pyproject.toml",
        "setup.py",
        "README.md",
        "d2tp/__init__.py",
    ] {
        copy(&own.join(file), &source.join(file))?;
    }
    staging::licences(&source)?;
    let library = source.join("libd2tp.so.1");
    compile::strip(&built.join("libd2tp.so"), &library)?;
    for old in files_like(&context.out, "d2tp-", ".whl")? {
        fs::remove_file(old)?;
    }
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"])
        .arg(source.join("made"));
    pip.env("D2TP_LIBRARY", &library);
    pip.env("SOURCE_DATE_EPOCH", context.epoch.to_string());
    call(pip.arg(&source))?;
    let made = files_like(&source.join("made"), "d2tp-", ".whl")?;
    let made = made.first().context("pip made no wheel")?;
    if context.tools.need(DistTool::Auditwheel).is_err() {
        eprintln!(
            "not for PyPI: without auditwheel and patchelf the wheel cannot say what it runs on"
        );
        let name = made.file_name().context("a wheel without a name")?;
        return copy(made, &context.out.join(name));
    }
    let mut audit = Command::new("auditwheel");
    audit
        .args(["repair", "--wheel-dir"])
        .arg(&context.out)
        .arg(made);
    audit.env("PATH", context.tools.path());
    call(&mut audit)
}

/// Makes an npm package with the binding built for this machine's architecture. It runs no script
/// on installation.
pub fn npm(context: &DistContext) -> Result<()> {
    let built = compile::native(context)?;
    let folder = context.scratch("npm")?;
    let own = root().join("bindings/node");
    for file in ["index.js", "README.md"] {
        copy(&own.join(file), &folder.join(file))?;
    }
    staging::licences(&folder)?;
    let arch = node_arch()?;
    let binding = format!("prebuilds/linux-{arch}/d2tp.node");
    compile::strip(&built.join("libd2tp_node.so"), &folder.join(&binding))?;
    let manifest: Value = serde_json::from_slice(&fs::read(own.join("package.json"))?)?;
    let manifest = packaged_manifest(manifest, &context.version, arch)?;
    fs::write(folder.join("package.json"), format!("{manifest:#}\n"))?;
    let mut pack = Command::new("npm");
    pack.args(["pack", "--silent", "--pack-destination"])
        .arg(&context.out);
    call(
        pack.current_dir(&folder)
            .stdout(std::process::Stdio::null()),
    )
}

/// Node's name of this machine's architecture.
fn node_arch() -> Result<&'static str> {
    match std::env::consts::ARCH {
        "x86_64" => Ok("x64"),
        "aarch64" => Ok("arm64"),
        other => bail!("Node's binding is not packaged for {other}"),
    }
}

/// The manifest of a package that includes its binding: nothing is built on installation.
fn packaged_manifest(mut manifest: Value, version: &str, arch: &str) -> Result<Value> {
    let fields = manifest
        .as_object_mut()
        .context("package.json is no object")?;
    if fields.get("version").and_then(Value::as_str) != Some(version) {
        bail!("bindings/node/package.json is not of version {version}");
    }
    for field in ["private", "scripts"] {
        fields.remove(field);
    }
    fields.insert(
        "files".to_owned(),
        json!(["index.js", "prebuilds", "LICENSE-*", "NOTICE*"]),
    );
    fields.insert("cpu".to_owned(), json!([arch]));
    fields.insert("libc".to_owned(), json!(["glibc"]));
    fields.insert("repository".to_owned(), json!(env!("CARGO_PKG_REPOSITORY")));
    Ok(manifest)
}

/// Makes the Go module of the last commit in the form of a module proxy: `GOPROXY=file://FOLDER`
/// reads the unpacked tarball.
pub fn go_module(context: &DistContext) -> Result<()> {
    let folder = context.scratch("go")?;
    let version = format!("v{}", context.version);
    let versions = folder.join("proxy").join(GO_MODULE).join("@v");
    fs::create_dir_all(&versions)?;
    let mut date = Command::new("date");
    let time = output(date.args(["-u", "-d", &format!("@{}", context.epoch), "+%FT%TZ"]))?;
    let info = json!({"Version": version, "Time": time.trim()});
    fs::write(versions.join(format!("{version}.info")), info.to_string())?;
    fs::write(versions.join("list"), format!("{version}\n"))?;
    let manifest = root().join("bindings/go/go.mod");
    let text = fs::read_to_string(&manifest)?;
    if !text.starts_with(&format!("module {GO_MODULE}\n")) {
        bail!(
            "{} names another module than {GO_MODULE}",
            manifest.display()
        );
    }
    fs::write(versions.join(format!("{version}.mod")), text)?;
    let mut git = Command::new("git");
    git.args([
        "archive",
        "--format=zip",
        &format!("--prefix={GO_MODULE}@{version}/"),
    ]);
    for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
        git.arg(format!("--add-file={}", root().join(licence).display()));
    }
    git.arg("-o").arg(versions.join(format!("{version}.zip")));
    call(git.arg("HEAD:bindings/go").current_dir(root()))?;
    tar_gz(context, &folder, &["proxy"], &go_file(context))
}

/// The path of the Go module.
pub fn go_file(context: &DistContext) -> PathBuf {
    context
        .out
        .join(format!("d2tp-go-{}.tar.gz", context.version))
}

/// The only file in the packages' folder whose name begins with `begin` and ends with `end`.
pub fn only(folder: &Path, begin: &str, end: &str) -> Result<PathBuf> {
    match files_like(folder, begin, end)?.as_slice() {
        [file] => Ok(file.clone()),
        found => bail!(
            "{} files {begin}…{end} in {}",
            found.len(),
            folder.display()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packaged_binding_for_node_builds_nothing() {
        let own = root().join("bindings/node/package.json");
        let own: Value = serde_json::from_slice(&fs::read(own).expect("a file")).expect("JSON");
        let made = packaged_manifest(own, env!("CARGO_PKG_VERSION"), "x64").expect("this version");
        assert_eq!(made["scripts"], Value::Null, "{made}");
        assert_eq!(made["cpu"], json!(["x64"]), "{made}");
    }
}
