//! The trial of the extension for browsers: Debian's own Firefox and Chromium load it from where its package puts it,
//! without a signature and without a question.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::context::{call, copy};
use super::debian::{DebianTrial, end_by_signal};
use super::debs;
use super::patience::wait_for;
use super::trial_network::NetworkEnd;
use crate::repository::root;

/// The folder of browsers' profiles, in the Debian.
const PROFILES: &str = "tmp/profiles";

/// How the browsers are started: without a screen. Chromium refuses root its sandbox.
const FIREFOX: &str =
    "firefox-esr --headless --no-remote --profile /tmp/profiles/firefox about:blank";
const CHROMIUM: &str = "chromium --headless=new --no-sandbox --disable-gpu --user-data-dir=/tmp/profiles/chromium about:blank";

impl DebianTrial<'_> {
    /// Installs the extension and both browsers. Each must run the extension in a new profile.
    pub fn browsers(&mut self) -> Result<()> {
        let wanted = ["cedos_", "webext-cedos_"];
        for deb in debs::made(self.context)? {
            let name = deb.file_name().context("a package without a name")?;
            let text = name.to_string_lossy();
            if wanted.iter().any(|begin| text.starts_with(begin)) {
                copy(&deb, &self.root.join("tmp/browsers").join(name))?;
            }
        }
        call(&mut self.shell(
            "apt-get update -q && \
             apt-get install -y -q --no-install-recommends /tmp/browsers/*.deb firefox-esr chromium",
        ))?;
        fs::create_dir_all(self.root.join(PROFILES).join("firefox"))?;
        let hosts = root().join("packaging/browser/hosts");
        let id = allowed(&hosts.join("firefox.json"), "allowed_extensions")?;
        self.loads(FIREFOX, |profiles| {
            let known = fs::read(profiles.join("firefox/extensions.json")).unwrap_or_default();
            // It is written in one go, but not there from the start.
            let known: Value = serde_json::from_slice(&known).unwrap_or_default();
            is_active(&known, &id)
        })?;
        let id = allowed(&hosts.join("chromium.json"), "allowed_origins")?;
        let id = id.trim_start_matches("chrome-extension://");
        let id = id.trim_end_matches('/');
        self.loads(CHROMIUM, |profiles| {
            // What the extension stores when it is installed: it runs.
            let stored = profiles.join("chromium/Default/Local Extension Settings");
            stored.join(id).is_dir()
        })
    }

    /// Starts a browser at the device's end, and waits until `loaded` holds for the folder of profiles.
    fn loads(&self, browser: &str, loaded: impl Fn(&Path) -> bool) -> Result<()> {
        let script = format!("exec {browser} > /tmp/browsers/log 2>&1");
        let mut started = self.shell_at(NetworkEnd::Device, &script).spawn()?;
        let profiles = self.root.join(PROFILES);
        let held = wait_for("the extension", || {
            let ended = started.try_wait()?;
            ensure!(ended.is_none(), "the browser ended: {browser}");
            Ok(loaded(&profiles))
        });
        end_by_signal(&mut started)?;
        held.with_context(|| {
            let log = fs::read_to_string(self.root.join("tmp/browsers/log"));
            format!("{browser}: {}", log.unwrap_or_default())
        })
    }
}

/// The one extension that a manifest of the helper allows.
fn allowed(manifest: &Path, field: &str) -> Result<String> {
    let manifest: Value = serde_json::from_slice(&fs::read(manifest)?)?;
    let id = manifest[field][0].as_str();
    Ok(id
        .context("the helper's manifest allows no extension")?
        .to_owned())
}

/// Whether Firefox's list of extensions has `id`, and it runs.
fn is_active(known: &Value, id: &str) -> bool {
    known["addons"].as_array().is_some_and(|all| {
        all.iter()
            .any(|one| one["id"] == id && one["active"] == true)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_extension_that_firefox_does_not_run_is_not_active() {
        let known = |active| json!({"addons": [{"id": "a@b", "active": true}, {"id": "c@d", "active": active}]});
        assert!(is_active(&known(true), "c@d"));
        assert!(!is_active(&known(false), "c@d"));
        assert!(!is_active(&known(true), "e@f"));
        assert!(!is_active(&Value::Null, "c@d"));
    }

    #[test]
    fn the_package_puts_the_extension_under_the_name_that_the_helper_allows() {
        let hosts = root().join("packaging/browser/hosts/firefox.json");
        let id = allowed(&hosts, "allowed_extensions").expect("an extension");
        let manifest = root().join("apps/cedos/Cargo.toml");
        let manifest = fs::read_to_string(manifest).expect("a manifest");
        assert!(manifest.contains(&format!("/{id}\" }}")), "{id}");
    }
}
