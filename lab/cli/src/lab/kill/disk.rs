//! A disk that loses power: a separate ext4 file system on a loop device. Its shutdown call
//! (`EXT4_IOC_SHUTDOWN`) drops unwritten data like a power cut; the next mount replays the journal.
//!
//! It cannot show drives that lie about their caches, or torn sectors.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

/// The size of the disk: room for the largest object and ext4's journal.
const BYTES: u64 = 64 << 20;
/// `EXT4_GOING_FLAGS_NOLOGFLUSH`: the file system's own journal is not written either.
static AT_ONCE: u32 = 2;
/// How long a killed process may take to release its files.
const LET_GO_WITHIN: Duration = Duration::from_secs(10);
/// The environment variable of the process with its own mounts.
const INSIDE: &str = "CEDOS_LAB_OWN_MOUNTS";

/// Mount options, which set how the file system orders data and its journal: the default, delayed
/// data, and both at short intervals so that some of it is written before the cut.
const OPTIONS: [&str; 4] = [
    "loop",
    "loop,commit=1",
    "loop,data=writeback",
    "loop,data=writeback,commit=1",
];

/// `EXT4_IOC_SHUTDOWN` // include/uapi/linux/ext4.h
const SHUTDOWN: libc::Ioctl = libc::_IOR::<u32>(b'X' as u32, 125);

/// A disk image that is mounted for a kill point.
#[derive(Debug)]
pub struct MountedDisk {
    place: PathBuf,
    image: PathBuf,
    options: &'static str,
}

/// Makes sure that this process has its own mounts, which end with it, if necessary by starting
/// itself again.
///
/// # Errors
/// Disks cannot be mounted here.
pub fn enter() -> anyhow::Result<()> {
    if std::env::var_os(INSIDE).is_some() {
        return probe().context("no disk can lose power here");
    }
    ensure!(
        nix::unistd::geteuid().is_root(),
        "no disk can lose power here: that needs root, to mount it on a loop device"
    );
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let error = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "--"])
        .arg(program)
        .args(std::env::args_os().skip(1))
        .env(INSIDE, "1")
        .exec();
    Err(error).context("`unshare` (util-linux) cannot be run")
}

/// Mounts a disk and cuts its power, to test whether that works here.
fn probe() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let disk = MountedDisk::new(&folder.path().join("disk"), 0)?;
    let file = disk.place.join("file");
    std::fs::write(&file, "not safe yet")?;
    disk.cut()?;
    ensure!(!file.exists(), "what was never synced survives a cut");
    Ok(())
}

impl MountedDisk {
    /// Creates a disk at the folder `place`, which is created as well. `which` selects mount
    /// options.
    ///
    /// # Errors
    /// The disk cannot be created or mounted.
    pub fn new(place: &Path, which: u64) -> anyhow::Result<MountedDisk> {
        let image = place.with_extension("ext4");
        File::create_new(&image)
            .and_then(|file| file.set_len(BYTES))
            .with_context(|| format!("{}", image.display()))?;
        succeed(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image))?;
        std::fs::create_dir_all(place).with_context(|| format!("{}", place.display()))?;
        let disk = MountedDisk {
            place: place.to_owned(),
            image,
            options: OPTIONS[(which % OPTIONS.len() as u64) as usize],
        };
        disk.mount()?;
        Ok(disk)
    }

    fn mount(&self) -> anyhow::Result<()> {
        let mut command = Command::new("mount");
        command.args(["-t", "ext4", "-o", self.options]);
        succeed(command.arg(&self.image).arg(&self.place))
    }

    fn unmount(&self) -> anyhow::Result<()> {
        let until = Instant::now() + LET_GO_WITHIN;
        loop {
            match succeed(Command::new("umount").arg(&self.place)) {
                Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(20)),
                ended => return ended,
            }
        }
    }

    /// Cuts the power, and mounts the disk again: unwritten data is gone.
    ///
    /// # Errors
    /// The file system does not support the call, or cannot be mounted again because it is damaged.
    pub fn cut(&self) -> anyhow::Result<()> {
        let place = File::open(&self.place)?;
        // SAFETY: the descriptor is open, and the kernel only reads the word behind the pointer.
        let done = unsafe { libc::ioctl(place.as_raw_fd(), SHUTDOWN, &raw const AT_ONCE) };
        ensure!(
            done == 0,
            "EXT4_IOC_SHUTDOWN: {}",
            std::io::Error::last_os_error()
        );
        drop(place);
        self.unmount()?;
        self.mount()
    }
}

impl Drop for MountedDisk {
    fn drop(&mut self) {
        let _ = self.unmount();
    }
}

fn succeed(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .with_context(|| format!("`{name}` cannot be run; install it"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{name}`: {}", said.trim());
    }
    Ok(())
}
