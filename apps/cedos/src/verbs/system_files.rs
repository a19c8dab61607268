//! Files of the system that proxy and agent read inside their sandboxes: for names, certificates, libraries, links.

use std::path::PathBuf;

use cedos_sandbox::{FileAccess, loaded_libraries};

/// What the kernel tells about this process, links, and processors.
const KERNEL: [&str; 4] = ["/proc", "/sys/class", "/sys/devices", "/sys/fs/cgroup"];
/// Libraries, which a name service may load later (nsswitch.conf(5)), and data that libraries read.
const LIBRARIES: [&str; 7] = [
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/nix/store",
];
/// Certificates of authorities, as distributions keep them.
const CERTIFICATES: [&str; 8] = [
    "/etc/ssl",
    "/etc/pki",
    "/etc/ca-certificates",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
    "/usr/share/pki",
    "/usr/share/ssl",
    "/var/lib/ca-certificates",
];
/// Variables that name other files of certificates, and credentials of buckets.
const FILE_VARIABLES: [&str; 5] = [
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "TZDIR",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
];
/// Files by which names are looked up (nsswitch.conf(5), resolv.conf(5)), and few others.
const NAME_FILES: [&str; 14] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/host.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/protocols",
    "/etc/networks",
    "/etc/passwd",
    "/etc/group",
    "/etc/localtime",
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/etc/machine-id",
];
/// Folders of the services that write resolv.conf(5).
const NAME_SERVICES: [&str; 5] = [
    "/run/systemd/resolve",
    "/run/resolvconf",
    "/run/NetworkManager",
    "/run/connman",
    "/run/nscd",
];
/// Devices that lead nowhere.
const NULL_DEVICES: [&str; 3] = ["/dev/null", "/dev/zero", "/dev/full"];
/// Sources of randomness.
const RANDOM_DEVICES: [&str; 2] = ["/dev/urandom", "/dev/random"];

/// Lets the files of the system be read.
///
/// Root reads the files of /etc that are named here, one by one: /etc/shadow is not among them. For another user, what
/// is secret in /etc is closed by its permissions, and all of it can be read: so a resolv.conf that another has replaced
/// is read again.
pub(super) fn allow_system_files(files: &mut FileAccess) {
    let folders = KERNEL.iter().chain(&LIBRARIES).chain(&CERTIFICATES);
    for path in folders.chain(&NAME_SERVICES).chain(&RANDOM_DEVICES) {
        files.read(path);
    }
    for device in NULL_DEVICES {
        files.write(device);
    }
    for folder in loaded_libraries() {
        files.read(folder);
    }
    let named = FILE_VARIABLES.iter().filter_map(std::env::var_os);
    for file in named.map(PathBuf::from) {
        match file.is_dir() {
            true => files.read(file),
            false => files.read_replaceable(file),
        };
    }
    match nix::unistd::geteuid().is_root() {
        true => {
            files.read("/etc/cedos");
            for file in NAME_FILES {
                files.read_replaceable(file);
            }
        }
        false => {
            files.read("/etc");
        }
    }
}
