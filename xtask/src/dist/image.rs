//! An OCI image of D2Prox, written according to the image specification: without a daemon or a base
//! image.
//!
//! | layer | holds |
//! |---|---|
//! | 1, root's | `/usr/bin/cedos` (static), the certificate authorities of this machine, users, licences, bill of materials |
//! | 2, the proxy's own user's | `/var/lib/cedos-prox`, empty: the volume |
//!
//! A layout consists of three kinds of JSON and some blobs named by their digests, so a crate for
//! it would be larger than this code.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::archive::{digest, gzip, tar};
use super::compile::{StaticArch, static_program, strip};
use super::context::{DistContext, copy, output};
use super::size_limit::{IMAGE_BYTES_MAX, within};
use super::{sbom, staging};

/// The user of the proxy in a container: the number that images without a shell commonly use.
pub const USER: u32 = 65_532;

/// The directory of the proxy's state.
const STATE: &str = "var/lib/cedos-prox";

/// The certificate authorities of this machine, in the one file in which most systems keep them.
const AUTHORITIES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Builds an image for each architecture in one layout, and packs it into a tarball.
pub fn make(context: &DistContext, archs: &[StaticArch]) -> Result<()> {
    let layout = context.scratch("image-layout")?;
    fs::create_dir_all(layout.join("blobs/sha256"))?;
    fs::write(
        layout.join("oci-layout"),
        json!({"imageLayoutVersion": "1.0.0"}).to_string(),
    )?;
    let mut manifests = Vec::new();
    for arch in archs {
        manifests.push(image(context, *arch, &layout)?);
    }
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": manifests,
    });
    // For several architectures, clients look for one name: an index in the index.
    let index = match archs {
        [_] => index,
        _ => {
            let mut all = put(&layout, &index, "application/vnd.oci.image.index.v1+json")?;
            all["annotations"] = json!({"org.opencontainers.image.ref.name": context.version});
            json!({
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.index.v1+json",
                "manifests": [all],
            })
        }
    };
    fs::write(layout.join("index.json"), index.to_string())?;
    let file = file(context);
    tar(
        context,
        &layout,
        &["oci-layout", "index.json", "blobs"],
        &file,
        0,
    )?;
    let limit = IMAGE_BYTES_MAX * archs.len() as u64;
    within("OCI image", fs::metadata(&file)?.len(), limit)
}

/// The path of the image.
pub fn file(context: &DistContext) -> PathBuf {
    context
        .out
        .join(format!("cedos-prox-{}.oci.tar", context.version))
}

/// Makes the blobs of one architecture; returns the descriptor of its manifest.
fn image(context: &DistContext, arch: StaticArch, layout: &Path) -> Result<Value> {
    let tree = context.scratch(&format!("image-{}", arch.name()))?;
    fill(context, arch, &tree)?;
    let (first, first_id) = layer(context, &tree, &["etc", "usr"], layout, 0)?;
    let (second, second_id) = layer(context, &tree, &[STATE], layout, USER)?;
    let mut date = Command::new("date");
    let created = output(date.args(["-u", "-d", &format!("@{}", context.epoch), "+%FT%TZ"]))?;
    let config = json!({
        "architecture": arch.oci_name(),
        "os": "linux",
        "created": created.trim(),
        "config": {
            "User": format!("{USER}:{USER}"),
            "Entrypoint": ["/usr/bin/cedos", "prox", "--state-dir", format!("/{STATE}")],
            "Env": ["PATH=/usr/bin"],
            "ExposedPorts": {"4433/udp": {}},
            "Volumes": {format!("/{STATE}"): {}},
            "WorkingDir": format!("/{STATE}"),
            "StopSignal": "SIGTERM",
            "Labels": labels(context),
        },
        "rootfs": {"type": "layers", "diff_ids": [first_id, second_id]},
    });
    let config = put(layout, &config, "application/vnd.oci.image.config.v1+json")?;
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config,
        "layers": [first, second],
        "annotations": labels(context),
    });
    let mut manifest = put(
        layout,
        &manifest,
        "application/vnd.oci.image.manifest.v1+json",
    )?;
    manifest["platform"] = json!({"architecture": arch.oci_name(), "os": "linux"});
    manifest["annotations"] = json!({"org.opencontainers.image.ref.name": context.version});
    Ok(manifest)
}

fn labels(context: &DistContext) -> Value {
    json!({
        "org.opencontainers.image.title": "D2Prox",
        "org.opencontainers.image.description": "The proxy of Cedos: fetches for devices, keeps what they have not received",
        "org.opencontainers.image.version": context.version,
        "org.opencontainers.image.source": env!("CARGO_PKG_REPOSITORY"),
        "org.opencontainers.image.licenses": "Apache-2.0 OR MIT",
    })
}

/// Creates the image's files.
fn fill(context: &DistContext, arch: StaticArch, tree: &Path) -> Result<()> {
    strip(&static_program(context, arch)?, &tree.join("usr/bin/cedos"))?;
    copy(Path::new(AUTHORITIES), &tree.join(&AUTHORITIES[1..]))
        .context("the package ca-certificates has the authorities that servers are checked with")?;
    fs::write(
        tree.join("etc/passwd"),
        format!(
            "root:x:0:0:root:/:/sbin/nologin\ncedos-prox:x:{USER}:{USER}:D2Prox:/{STATE}:/sbin/nologin\n"
        ),
    )?;
    fs::write(
        tree.join("etc/group"),
        format!("root:x:0:\ncedos-prox:x:{USER}:\n"),
    )?;
    let doc = tree.join("usr/share/doc/cedos");
    fs::create_dir_all(&doc)?;
    staging::licences(&doc)?;
    copy(&sbom::of_program(context)?, &doc.join("sbom.cdx.json"))?;
    fs::create_dir_all(tree.join(STATE))?;
    Ok(())
}

/// Packs a layer; returns its descriptor and the digest of it before compression.
fn layer(
    context: &DistContext,
    tree: &Path,
    names: &[&str],
    layout: &Path,
    owner: u32,
) -> Result<(Value, String)> {
    let plain = layout.join("layer");
    tar(context, tree, names, &plain, owner)?;
    let id = format!("sha256:{}", digest(&fs::read(&plain)?));
    gzip(&plain)?;
    let compressed = layout.join("layer.gz");
    let bytes = fs::read(&compressed)?;
    fs::remove_file(compressed)?;
    Ok((
        put_bytes(
            layout,
            &bytes,
            "application/vnd.oci.image.layer.v1.tar+gzip",
        )?,
        id,
    ))
}

fn put(layout: &Path, value: &Value, media_type: &str) -> Result<Value> {
    put_bytes(layout, value.to_string().as_bytes(), media_type)
}

/// Writes a blob under its digest; returns the descriptor.
fn put_bytes(layout: &Path, bytes: &[u8], media_type: &str) -> Result<Value> {
    let digest = digest(bytes);
    fs::write(layout.join("blobs/sha256").join(&digest), bytes)?;
    Ok(json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len()}))
}

/// Unpacks the image for an architecture like a runtime, and returns its entry point. Every blob is
/// compared with its digest.
pub fn unpack(file: &Path, to: &Path, arch: StaticArch) -> Result<Vec<String>> {
    let layout = tempfile::tempdir()?;
    super::context::call(
        Command::new("tar")
            .arg("-C")
            .arg(layout.path())
            .arg("-xf")
            .arg(file),
    )?;
    let index: Value = serde_json::from_slice(&fs::read(layout.path().join("index.json"))?)?;
    let architecture = arch.oci_name();
    let mut found = index["manifests"][0].clone();
    if found["mediaType"] == "application/vnd.oci.image.index.v1+json" {
        let inner: Value = serde_json::from_slice(&blob(layout.path(), &found)?)?;
        let manifests = inner["manifests"].as_array();
        found = manifests
            .and_then(|all| {
                all.iter()
                    .find(|one| one["platform"]["architecture"] == architecture)
            })
            .with_context(|| format!("the image has nothing for {architecture}"))?
            .clone();
    }
    let manifest: Value = serde_json::from_slice(&blob(layout.path(), &found)?)?;
    let config: Value = serde_json::from_slice(&blob(layout.path(), &manifest["config"])?)?;
    for layer in manifest["layers"].as_array().context("no layers")? {
        let packed = layout.path().join("layer.tar.gz");
        fs::write(&packed, blob(layout.path(), layer)?)?;
        let mut tar = Command::new("tar");
        super::context::call(tar.arg("-C").arg(to).arg("-xpzf").arg(&packed))?;
    }
    let entry = config["config"]["Entrypoint"]
        .as_array()
        .context("no entry point")?;
    Ok(entry
        .iter()
        .filter_map(|word| word.as_str().map(str::to_owned))
        .collect())
}

fn blob(layout: &Path, descriptor: &Value) -> Result<Vec<u8>> {
    let name = descriptor["digest"]
        .as_str()
        .context("a descriptor without digest")?;
    let hash = name.strip_prefix("sha256:").context("another digest")?;
    let bytes = fs::read(layout.join("blobs/sha256").join(hash))?;
    anyhow::ensure!(digest(&bytes) == hash, "{name} has other bytes");
    anyhow::ensure!(descriptor["size"] == bytes.len(), "{name} has another size");
    Ok(bytes)
}
