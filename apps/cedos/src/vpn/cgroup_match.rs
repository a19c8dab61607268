//! Programs told apart by their cgroup: what nftables matches them by.
//!
//! | cgroups of the machine | nftables |
//! |---|---|
//! | version 2 | `socket cgroupv2 level 2 "system.slice/backup.service"` |
//! | version 1 with `net_cls` | `meta cgroup CLASS`, the class that `net_cls.classid` has |
//!
//! nftables keeps the number of a cgroup of version 2, not its path.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// Where `nft` looks for cgroups of version 2.
const NFT_CGROUPS: &str = "/sys/fs/cgroup";

/// The file of a cgroup of version 1 with the class of its programs' packets.
const CLASS_FILE: &str = "net_cls.classid";

/// What nftables matches programs of a cgroup by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupMatch {
    expression: String,
}

/// Where the system has its cgroups mounted.
#[derive(Debug, Default, PartialEq, Eq)]
struct CgroupMounts {
    /// Version 2.
    unified: Option<PathBuf>,
    /// Version 1, the controller `net_cls`.
    net_cls: Option<PathBuf>,
}

impl CgroupMatch {
    /// Finds a cgroup by its path below the root of cgroups, as `/proc/PID/cgroup` names it, or by its directory.
    ///
    /// # Errors
    /// There is no such cgroup, or its programs cannot be told apart on this machine.
    pub fn find(path: &Path) -> anyhow::Result<CgroupMatch> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo")
            .context("cannot read which cgroups this machine has")?;
        CgroupMatch::find_in(path, &CgroupMounts::parse(&mounts), Path::new(NFT_CGROUPS))
    }

    fn find_in(
        path: &Path,
        mounts: &CgroupMounts,
        nft_cgroups: &Path,
    ) -> anyhow::Result<CgroupMatch> {
        let shown = path.display();
        if path.components().any(|part| part.as_os_str() == "..")
            || path.to_string_lossy().contains(['"', '\\', '\n'])
        {
            bail!("`{shown}` is no path of a cgroup");
        }
        if let Some(mount) = &mounts.unified
            && let Some(below) = existing(mount, path)
        {
            let level = below.components().count();
            if level == 0 {
                bail!("every program is in the cgroup `{shown}`; name one below it");
            }
            let Ok(mount) = mount.strip_prefix(nft_cgroups) else {
                bail!(
                    "cgroups are at {}, but nft looks for them below {}",
                    mount.display(),
                    nft_cgroups.display()
                );
            };
            let for_nft = mount.join(&below);
            return Ok(CgroupMatch {
                expression: format!("socket cgroupv2 level {level} \"{}\"", for_nft.display()),
            });
        }
        if let Some(mount) = &mounts.net_cls
            && let Some(below) = existing(mount, path)
        {
            let file = mount.join(below).join(CLASS_FILE);
            let class = std::fs::read_to_string(&file)
                .with_context(|| format!("cannot read {}", file.display()))?;
            let class: u32 = class.trim().parse().unwrap_or(0);
            if class == 0 {
                bail!(
                    "packets of the cgroup `{shown}` have no class; write one, as `echo 0x518301 > {}`",
                    file.display()
                );
            }
            return Ok(CgroupMatch {
                expression: format!("meta cgroup {class}"),
            });
        }
        match (&mounts.unified, &mounts.net_cls) {
            (None, None) => bail!(
                "programs cannot be told apart on this machine: it has neither cgroups of version 2 nor net_cls of version 1"
            ),
            (unified, net_cls) => {
                let all = unified.iter().chain(net_cls);
                let places: Vec<String> = all.map(|at| at.display().to_string()).collect();
                bail!(
                    "there is no cgroup `{shown}` in {}; `cat /proc/PID/cgroup` shows that of a program",
                    places.join(", or ")
                )
            }
        }
    }

    /// The expression of nftables.
    pub fn expression(&self) -> &str {
        &self.expression
    }
}

/// The path of a cgroup below `mount`, if there is such a one. `path` is its directory, or where it is below the root.
fn existing(mount: &Path, path: &Path) -> Option<PathBuf> {
    let below = match path.strip_prefix(mount) {
        Ok(below) => below,
        Err(_) => path.strip_prefix("/").unwrap_or(path),
    };
    mount.join(below).is_dir().then(|| below.to_owned())
}

impl CgroupMounts {
    /// Reads `/proc/PID/mountinfo`.
    fn parse(mounts: &str) -> CgroupMounts {
        let mut found = CgroupMounts::default();
        for line in mounts.lines() {
            // proc(5): fields of the mount, ` - `, type, source, options of the file system.
            let Some((mount, system)) = line.split_once(" - ") else {
                continue;
            };
            let Some(at) = mount.split(' ').nth(4).map(PathBuf::from) else {
                continue;
            };
            let mut system = system.split(' ');
            let (kind, options) = (system.next(), system.nth(1).unwrap_or_default());
            match kind {
                Some("cgroup2") => drop(found.unified.get_or_insert(at)),
                Some("cgroup") if options.split(',').any(|option| option == "net_cls") => {
                    found.net_cls.get_or_insert(at);
                }
                _ => {}
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
30 24 0:26 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 cgroup2 rw,nsdelegate
32 30 0:28 / /sys/fs/cgroup/net_cls,net_prio rw,nosuid shared:11 - cgroup cgroup rw,net_cls,net_prio
";

    #[test]
    fn a_hybrid_machine_has_cgroups_of_both_versions() {
        let mounts = CgroupMounts::parse(HYBRID);
        let unified = Some(PathBuf::from("/sys/fs/cgroup/unified"));
        let net_cls = Some(PathBuf::from("/sys/fs/cgroup/net_cls,net_prio"));
        assert_eq!(mounts, CgroupMounts { unified, net_cls });
        assert_eq!(CgroupMounts::parse(""), CgroupMounts::default());
    }

    #[test]
    fn a_cgroup_is_found_by_its_path_or_its_directory_and_what_is_missing_is_told() {
        let home = tempfile::tempdir().unwrap();
        let (unified, net_cls) = (home.path().join("unified"), home.path().join("net_cls"));
        std::fs::create_dir_all(unified.join("system.slice/a.service")).unwrap();
        std::fs::create_dir_all(net_cls.join("b")).unwrap();
        std::fs::write(net_cls.join("b/net_cls.classid"), "5341953\n").unwrap();
        std::fs::create_dir_all(net_cls.join("c")).unwrap();
        std::fs::write(net_cls.join("c/net_cls.classid"), "0\n").unwrap();
        let mounts = CgroupMounts {
            unified: Some(unified.clone()),
            net_cls: Some(net_cls),
        };
        let find = |path: &str| CgroupMatch::find_in(Path::new(path), &mounts, home.path());
        let expected = "socket cgroupv2 level 2 \"unified/system.slice/a.service\"";
        let directory = unified.join("system.slice/a.service");
        for path in [
            "system.slice/a.service",
            "/system.slice/a.service",
            directory.to_str().unwrap(),
        ] {
            assert_eq!(find(path).unwrap().expression(), expected);
        }
        assert_eq!(find("b").unwrap().expression(), "meta cgroup 5341953");
        for (path, word) in [
            ("c", "echo 0x518301 >"),
            ("none.slice", "there is no cgroup `none.slice`"),
            ("/", "every program"),
            ("a\"; drop", "no path"),
            ("../a", "no path"),
        ] {
            let error = find(path).unwrap_err().to_string();
            assert!(error.contains(word), "{path}: {error}");
        }
        let none = CgroupMounts::default();
        let error = CgroupMatch::find_in(Path::new("b"), &none, home.path()).unwrap_err();
        assert!(error.to_string().contains("net_cls"), "{error}");
    }
}
