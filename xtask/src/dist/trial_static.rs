//! The trial of what is linked statically: the program of the tarball and the image, for each architecture that was
//! built and that this machine can start. Another architecture's programs are started by qemu, which the kernel calls
//! for them (binfmt_misc).

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use super::compile::StaticArch;
use super::context::call;
use super::debian::{DebianTrial, end};
use super::image;
use super::tarball;
use super::trial_network::{NetworkEnd, SERVER};
use crate::step::StepOutcome;

/// A program of the C library for another architecture, in the Debian.
const OTHER_BUSYBOX: &str = "/opt/other/bin/busybox";

impl DebianTrial<'_> {
    /// Tests the program of the tarball as proxy and as device. The Debian has none of the packages then.
    pub fn static_program(&mut self, arch: StaticArch) -> Result<StepOutcome> {
        if let Some(outcome) = obstacle(&tarball::file(self.context, arch), arch)? {
            return Ok(outcome);
        }
        let program = format!("/tmp/{}/cedos", arch.name());
        let folder = self.root.join("tmp").join(arch.name());
        fs::create_dir_all(&folder)?;
        let mut unpack = Command::new("tar");
        unpack.arg("-C").arg(&folder).arg("--strip-components=1");
        call(unpack.arg("-xzf").arg(tarball::file(self.context, arch)))?;
        let linked = self.shell(&format!("ldd {program}")).output()?;
        let libraries = String::from_utf8_lossy(&linked.stdout);
        ensure!(
            !linked.status.success() || is_static(&libraries),
            "not static: {libraries}"
        );
        let busybox = self.busybox(arch)?;
        let words: [&OsStr; 4] = [
            "chroot".as_ref(),
            self.root.as_os_str(),
            program.as_ref(),
            "prox".as_ref(),
        ];
        let (proxy, address) = self.proxy_of(&words, &format!("/tmp/{}/state", arch.name()))?;
        let get = format!("{program} get http://{SERVER}/small --prox {address} -o -");
        let run = format!(
            "{program} run --rung preload --prox {address} -- {busybox} wget -q -O - http://{SERVER}/small"
        );
        let held = self
            .page(&mut self.shell_at(NetworkEnd::Device, &get))
            // Its library, in a program of glibc.
            .and_then(|()| self.page(&mut self.shell_at(NetworkEnd::Device, &run)));
        end(proxy)?;
        held.map(|()| StepOutcome::Held)
    }

    /// Tests the image, unpacked like by a runtime, with its entry point and its user.
    pub fn image(&mut self, arch: StaticArch) -> Result<StepOutcome> {
        let file = image::file(self.context);
        if let Some(outcome) = obstacle(&file, arch)? {
            return Ok(outcome);
        }
        let folder = self.context.scratch("image-try")?;
        let entry = image::unpack(&file, &folder, arch)?;
        let user = format!("--userspec={0}:{0}", image::USER);
        let mut words: Vec<&OsStr> = vec!["chroot".as_ref(), user.as_ref(), folder.as_os_str()];
        words.extend(entry.iter().map(OsStr::new));
        let (proxy, address) = self.proxy_of(&words, "")?;
        let mut get = self.network.enter(NetworkEnd::Device);
        get.arg(self.program()?)
            .args(["get", "-o", "-", "--prox", &address]);
        get.arg(format!("http://{SERVER}/small"))
            .env("HOME", self.context.scratch("image-home")?);
        let held = self.page(&mut get);
        end(proxy)?;
        held.map(|()| StepOutcome::Held)
    }

    /// A dynamic program of this architecture in the Debian, for `cedos run`.
    fn busybox(&self, arch: StaticArch) -> Result<&'static str> {
        if arch == StaticArch::own()? {
            return Ok("busybox");
        }
        // Two packages of busybox cannot be installed at once.
        let other = arch.debian_name();
        call(&mut self.shell(&format!(
            "set -e; dpkg --add-architecture {other}; apt-get update -q; \
             apt-get install -y -q --no-install-recommends libc6:{other}; \
             cd /tmp; apt-get download -q busybox:{other}; dpkg-deb -x busybox_*_{other}.deb /opt/other"
        )))?;
        Ok(OTHER_BUSYBOX)
    }
}

/// Whether that is what ldd says of a program that needs no library although it may be loaded at any address. Of one with a
/// fixed address it says nothing, and fails.
fn is_static(libraries: &str) -> bool {
    libraries.trim() == "statically linked"
}

/// The reason why a file cannot be tried here, if any.
fn obstacle(file: &Path, arch: StaticArch) -> Result<Option<StepOutcome>> {
    if !file.is_file() {
        return Ok(Some(StepOutcome::Skipped("was not made".to_owned())));
    }
    if arch == StaticArch::own()? {
        return Ok(None);
    }
    let registration = format!("/proc/sys/fs/binfmt_misc/qemu-{}", arch.name());
    let registration = fs::read_to_string(registration).unwrap_or_default();
    let why = format!(
        "this kernel starts no programs for {0}: the packages qemu-user-static and binfmt-support register qemu for them",
        arch.name()
    );
    Ok((!is_usable(&registration)).then_some(StepOutcome::Skipped(why)))
}

/// Whether a registration of binfmt_misc is enabled, and opened its interpreter in advance: in a chroot there is none.
fn is_usable(registration: &str) -> bool {
    let mut lines = registration.lines();
    lines.next() == Some("enabled")
        && lines
            .filter_map(|line| line.strip_prefix("flags: "))
            .any(|flags| flags.contains('F'))
}

#[cfg(test)]
mod tests {
    use super::{is_static, is_usable};

    #[test]
    fn a_program_with_libraries_is_not_static() {
        assert!(is_static("\tstatically linked\n"));
        assert!(!is_static(
            "\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f2b58800000)\n"
        ));
        assert!(!is_static(""));
    }

    #[test]
    fn qemu_is_used_in_a_chroot_only_if_the_kernel_opened_it_before() {
        let text = "enabled\ninterpreter /usr/bin/qemu-aarch64-static\nflags: OCF\noffset 0\nmagic 7f454c46\n";
        assert!(is_usable(text));
        assert!(!is_usable(&text.replace("OCF", "OC")));
        assert!(!is_usable(&text.replace("enabled", "disabled")));
        assert!(!is_usable(""));
    }
}
