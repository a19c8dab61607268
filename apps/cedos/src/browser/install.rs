//! Tells the browsers of a user which program takes downloads, and for which extension.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde_json::Value;

/// The name of the helper, by which the extension asks for it.
const NAME: &str = "io.github.cedos";

/// The manifests as packages install them; a user's own name another program.
const FIREFOX_MANIFEST: &str = include_str!("../../../../packaging/browser/hosts/firefox.json");
const CHROMIUM_MANIFEST: &str = include_str!("../../../../packaging/browser/hosts/chromium.json");

/// The files of the extension.
const EXTENSION: [(&str, &[u8]); 3] = [
    (
        "manifest.json",
        include_bytes!("../../../../packaging/browser/extension/manifest.json"),
    ),
    (
        "background.js",
        include_bytes!("../../../../packaging/browser/extension/background.js"),
    ),
    (
        "icon.png",
        include_bytes!("../../../../packaging/browser/extension/icon.png"),
    ),
];

/// Browsers made from Chromium: their names, and their folders below `~/.config`. Manifests are put where a folder
/// is, and always for the first.
const CHROMIUM_FOLDERS: [(&str, &str); 5] = [
    ("Chromium", "chromium"),
    ("Google Chrome", "google-chrome"),
    ("Brave", "BraveSoftware/Brave-Browser"),
    ("Microsoft Edge", "microsoft-edge"),
    ("Vivaldi", "vivaldi"),
];

/// The folders of a user that matter here.
pub struct BrowserFolders {
    home: PathBuf,
    config: PathBuf,
    data: PathBuf,
}

/// A browser's manifest: the browser's name, the manifest's path, and its text as packages install it.
struct BrowserManifest {
    browser: &'static str,
    path: PathBuf,
    text: &'static str,
}

impl BrowserFolders {
    /// The folders that the environment names.
    ///
    /// # Errors
    /// There is no home directory.
    pub fn from_env() -> anyhow::Result<BrowserFolders> {
        let absolute = |name: &str| {
            let path = std::env::var_os(name).map(PathBuf::from);
            path.filter(|path| path.is_absolute())
        };
        let home = absolute("HOME").context("no place for the browsers' files: set HOME")?;
        Ok(BrowserFolders {
            config: absolute("XDG_CONFIG_HOME").unwrap_or_else(|| home.join(".config")),
            data: absolute("XDG_DATA_HOME").unwrap_or_else(|| home.join(".local/share")),
            home,
        })
    }

    fn ours(&self) -> PathBuf {
        self.data.join("cedos")
    }

    /// The program that browsers start.
    fn program(&self) -> PathBuf {
        self.ours().join("native-messaging-host")
    }

    /// The folder of the extension, from which a browser loads it.
    pub fn extension(&self) -> PathBuf {
        self.ours().join("browser-extension")
    }

    fn manifests(&self) -> Vec<BrowserManifest> {
        let file = format!("{NAME}.json");
        let firefox = BrowserManifest {
            browser: "Firefox",
            path: self
                .home
                .join(".mozilla/native-messaging-hosts")
                .join(&file),
            text: FIREFOX_MANIFEST,
        };
        let chromium = CHROMIUM_FOLDERS.iter().enumerate();
        let chromium = chromium.filter_map(|(place, (browser, folder))| {
            let folder = self.config.join(folder);
            (place == 0 || folder.is_dir()).then(|| BrowserManifest {
                browser,
                path: folder.join("NativeMessagingHosts").join(&file),
                text: CHROMIUM_MANIFEST,
            })
        });
        std::iter::once(firefox).chain(chromium).collect()
    }

    /// Writes the program, the manifests and the extension. Returns the browsers that know the program now.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn install(&self, cedos: &Path) -> anyhow::Result<Vec<&'static str>> {
        let program = self.program();
        write(&program, launcher(cedos)?.as_bytes())?;
        std::fs::set_permissions(&program, Permissions::from_mode(0o755))?;
        for (name, bytes) in EXTENSION {
            write(&self.extension().join(name), bytes)?;
        }
        let mut browsers = Vec::new();
        for manifest in self.manifests() {
            let mut object: Value = serde_json::from_str(manifest.text)?;
            object["path"] = program.to_str().context("the home is no text")?.into();
            write(&manifest.path, format!("{object:#}\n").as_bytes())?;
            browsers.push(manifest.browser);
        }
        Ok(browsers)
    }

    /// Removes what [`BrowserFolders::install`] wrote. Returns the browsers that knew the program.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn remove(&self) -> anyhow::Result<Vec<&'static str>> {
        let mut browsers = Vec::new();
        for manifest in self.manifests() {
            if remove(&manifest.path)? {
                browsers.push(manifest.browser);
            }
        }
        remove(&self.program())?;
        for (name, _) in EXTENSION {
            remove(&self.extension().join(name))?;
        }
        // Whatever else lies there is not ours.
        let _ = std::fs::remove_dir(self.extension());
        Ok(browsers)
    }
}

/// The program that browsers start: they give it arguments of their own and none of ours.
fn launcher(cedos: &Path) -> anyhow::Result<String> {
    let path = cedos.to_str().context("the path of cedos is no text")?;
    if path.contains(['\n', '\'']) {
        bail!("{path:?} cannot be written into a shell script");
    }
    Ok(format!("#!/bin/sh\nexec '{path}' browser host \"$@\"\n"))
}

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let folder = path.parent().context("no folder")?;
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// Removes a file; false if there is none.
fn remove(path: &Path) -> anyhow::Result<bool> {
    match std::fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| format!("cannot remove {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;
    use sha2::{Digest, Sha256};

    #[test]
    fn the_manifests_name_the_extension_that_is_shipped() {
        let read = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        let extension: Value = serde_json::from_slice(EXTENSION[0].1).unwrap();
        // Chromium's id of an extension: the digest of its key, its digits as letters from a on.
        let key = extension["key"].as_str().unwrap();
        let key = base64::prelude::BASE64_STANDARD.decode(key).unwrap();
        let digest = hex::encode(&Sha256::digest(&key)[..16]);
        let id: String = digest
            .chars()
            .map(|digit| (b'a' + digit.to_digit(16).unwrap() as u8) as char)
            .collect();
        let (chromium, firefox) = (read(CHROMIUM_MANIFEST), read(FIREFOX_MANIFEST));
        assert_eq!(
            chromium["allowed_origins"][0],
            format!("chrome-extension://{id}/")
        );
        let gecko = &extension["browser_specific_settings"]["gecko"];
        assert_eq!(firefox["allowed_extensions"][0], gecko["id"]);
        assert_eq!(
            (&chromium["name"], &firefox["name"]),
            (&NAME.into(), &NAME.into())
        );
        assert_eq!(extension["version"], env!("CARGO_PKG_VERSION"));
        let script = String::from_utf8_lossy(EXTENSION[1].1);
        assert!(script.contains(&format!("const HOST = \"{NAME}\"")));
    }

    #[test]
    fn what_was_installed_is_removed_and_nothing_else() {
        let home = tempfile::tempdir().unwrap();
        let folders = BrowserFolders {
            home: home.path().to_owned(),
            config: home.path().join(".config"),
            data: home.path().join(".local/share"),
        };
        std::fs::create_dir_all(home.path().join(".config/vivaldi")).unwrap();
        let browsers = folders.install(Path::new("/usr/bin/cedos")).unwrap();
        assert_eq!(browsers, ["Firefox", "Chromium", "Vivaldi"]);
        let manifest = home
            .path()
            .join(".config/vivaldi/NativeMessagingHosts/io.github.cedos.json");
        let manifest: Value = serde_json::from_slice(&std::fs::read(manifest).unwrap()).unwrap();
        let program = manifest["path"].as_str().unwrap();
        let text = std::fs::read_to_string(program).unwrap();
        assert!(
            text.ends_with("exec '/usr/bin/cedos' browser host \"$@\"\n"),
            "{text}"
        );
        std::fs::write(folders.extension().join("mine"), "").unwrap();
        assert_eq!(folders.remove().unwrap(), browsers);
        assert!(!Path::new(program).exists());
        assert!(folders.extension().join("mine").exists());
        assert!(folders.remove().unwrap().is_empty());
        assert!(launcher(Path::new("/a'b/cedos")).is_err());
    }
}
