//! Files with the user's passwords and cookies: read whole, up to a size, and warned about if others can read them.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The most bytes of such a file.
const BYTES_MAX: u64 = 8 << 20; // a guess: ten thousand cookies are two megabytes

/// The text of a file.
///
/// # Errors
/// It cannot be read, or is not one that a person or a program wrote for this; in words.
pub(super) fn read(path: &Path) -> Result<String, String> {
    let failed = |error: &std::io::Error| format!("cannot read {}: {error}", path.display());
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(|error| failed(&error))?;
    let read = file.take(BYTES_MAX + 1).read_to_end(&mut bytes);
    read.map_err(|error| failed(&error))?;
    if bytes.len() as u64 > BYTES_MAX {
        return Err(format!(
            "{} has more than {} MB",
            path.display(),
            BYTES_MAX >> 20
        ));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A warning if other users can read the file.
pub fn permission_warning(path: &Path) -> Option<String> {
    let mode = path
        .metadata()
        .ok()
        .filter(std::fs::Metadata::is_file)?
        .mode()
        & 0o7777;
    (mode & 0o077 != 0).then(|| {
        let shown = path.display();
        format!(
            "other users can use the secrets in {shown}, because its mode is {mode:04o}; `chmod 600 {shown}` \
             changes that"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_file_that_others_can_read_is_warned_about() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("netrc");
        std::fs::write(&path, "machine h login me password p").expect("written");
        let warned = |mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(&path, mode).expect("changed");
            permission_warning(&path)
        };
        assert_eq!(warned(0o600), None);
        assert_eq!(warned(0o400), None);
        assert!(warned(0o640).expect("a warning").contains("0640"));
        assert!(warned(0o604).expect("a warning").contains("chmod 600"));
        assert_eq!(permission_warning(Path::new("/dev/null")), None);
    }
}
