//! The servers of the evening at the lab's origin, each a program of the distribution.
//!
//! | port | program | for |
//! |---|---|---|
//! | 22 | OpenSSH | a shell |
//! | 53 | dnsmasq | every name below `evening.test` |
//! | 80 | Caddy | a package repository, and a large file |
//! | 123 | chronyd | time |
//! | 143 | Dovecot | a mailbox |
//! | 443 | Caddy, HTTP/3 | web pages |

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use cedos_lab_emu::World;
use cedos_lab_emu::plan::ORIGIN_V4;
use cedos_lab_rig::namespace::sh;
use cedos_lab_rig::origin::object;
use cedos_lab_rig::wait::until_blocking;

/// The package of the repository.
pub const PACKAGE: &str = "evening-data";
/// Its size. It takes some seconds at [`super::programs::APT_KBYTES_PER_S`].
const PACKAGE_BYTES: usize = 3_000_000;
/// The size of the large file.
pub const FILE_BYTES: usize = 36_000_000;
/// The images of a web page.
pub const IMAGES: usize = 8;
/// About the size of an image.
const IMAGE_BYTES: usize = 40_000;
/// The password of the mailbox.
pub const PASSWORD: &str = "evening";

/// The running servers, and their files.
pub struct EveningServers {
    folder: PathBuf,
    /// The hash of the web server's public key, as Chromium takes it.
    pub key_hash: String,
    _running: Vec<Child>,
}

impl EveningServers {
    /// Starts all servers, with their files in `folder`.
    pub fn start(world: &World, folder: &Path) -> EveningServers {
        std::fs::create_dir(folder).expect("made");
        let mut servers = EveningServers {
            folder: folder.to_owned(),
            key_hash: String::new(),
            _running: Vec::new(),
        };
        servers.make_files();
        let at = folder.display();
        let lines = [
            format!(
                "dnsmasq --keep-in-foreground --conf-file=/dev/null --no-resolv --no-hosts --bind-interfaces \
                 --local-ttl=300 --listen-address={ORIGIN_V4} --address=/evening.test/{ORIGIN_V4} --pid-file= --user=root"
            ),
            format!("caddy run --config {at}/Caddyfile --adapter caddyfile"),
            format!("/usr/sbin/sshd -D -e -f {at}/sshd_config"),
            format!("chronyd -x -d -u root -f {at}/chrony.conf"),
            format!("dovecot -F -c {at}/dovecot.conf"),
        ];
        for line in &lines {
            let (program, _) = line.split_once(' ').expect("a program");
            let name = Path::new(program).file_name().expect("a name");
            let log = folder.join(name).with_extension("log");
            let log = std::fs::File::create(log).expect("a file");
            let mut command = Command::new("sh");
            command
                .args(["-c", &format!("exec {line}")])
                .env("HOME", folder)
                .env("XDG_DATA_HOME", folder)
                .env("XDG_CONFIG_HOME", folder)
                .stdin(Stdio::null())
                .stdout(log.try_clone().expect("a descriptor"))
                .stderr(log);
            let child = world.origin().spawn(command).expect("started");
            servers._running.push(child);
        }
        servers.await_ports(world);
        servers
    }

    /// The folder with the servers' files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Waits until all ports are open.
    fn await_ports(&self, world: &World) {
        let open = |ports: &'static [u16], file: &'static str| {
            let all_open = world.origin().run(move |_| {
                let table = std::fs::read_to_string(file).expect("the kernel's sockets");
                let locals = table
                    .lines()
                    .filter_map(|line| line.split_whitespace().nth(1));
                let open: Vec<u16> = locals
                    .filter_map(|local| u16::from_str_radix(local.rsplit(':').next()?, 16).ok())
                    .collect();
                ports.iter().all(|port| open.contains(port))
            });
            all_open.expect("it ran")
        };
        until_blocking("the servers listen", || {
            // Dovecot, sshd and Caddy may listen on IPv4 or on both families.
            open(&[53, 80, 143, 443], "/proc/thread-self/net/tcp")
                && open(&[22], "/proc/thread-self/net/tcp")
                && open(&[53, 123, 443], "/proc/thread-self/net/udp")
        });
    }

    /// Has a message arrive in the mailbox.
    pub fn deliver_mail(&self) {
        let message =
            "From: friend@evening.test\nTo: me@evening.test\nSubject: late\n\nGood evening.\n";
        let mailbox = self.folder.join("mail/new");
        // Written elsewhere first: the mailbox is watched.
        let written = self.folder.join("mail/tmp/1.evening");
        std::fs::write(&written, message).expect("written");
        sh(&format!("chown nobody {}", written.display()));
        std::fs::rename(&written, mailbox.join("1.evening")).expect("delivered");
    }

    /// The bytes of the large file.
    pub fn file_bytes() -> Vec<u8> {
        object(FILE_BYTES, 7)
    }

    fn make_files(&mut self) {
        let at = self.folder.display().to_string();
        let write = |name: &str, bytes: &[u8]| {
            std::fs::write(self.folder.join(name), bytes).expect("written");
        };
        sh(&format!(
            "chmod 755 {at}
             mkdir -p {at}/web {at}/files {at}/package/DEBIAN {at}/package/usr/share/evening /run/sshd /run/chrony
             mkdir -p {at}/mail/new {at}/mail/cur {at}/mail/tmp /run/dovecot
             chown -R nobody {at}/mail
             openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 7 -subj /CN=web.evening.test \
                 -addext subjectAltName=DNS:web.evening.test -keyout {at}/web.key -out {at}/web.pem 2>/dev/null
             openssl x509 -in {at}/web.pem -pubkey -noout | openssl pkey -pubin -outform der \
                 | openssl dgst -sha256 -binary >{at}/web.hash
             ssh-keygen -q -t ed25519 -N '' -f {at}/host_key
             ssh-keygen -q -t ed25519 -N '' -f {at}/user_key"
        ));
        let hash = std::fs::read(self.folder.join("web.hash")).expect("made");
        self.key_hash = STANDARD.encode(hash);
        write("files/large", &EveningServers::file_bytes());
        write(
            "package/DEBIAN/control",
            format!(
                "Package: {PACKAGE}\nVersion: 1\nArchitecture: all\nMaintainer: Evening <evening@evening.test>\n\
                 Description: bytes\n"
            )
            .as_bytes(),
        );
        write("package/usr/share/evening/bytes", &object(PACKAGE_BYTES, 8));
        sh(&format!(
            "dpkg-deb -Znone --root-owner-group --build {at}/package {at}/files/{PACKAGE}_1_all.deb >/dev/null
             cd {at}/files
             dpkg-scanpackages . >Packages 2>/dev/null"
        ));
        for page in 0..IMAGES {
            let noise: String = object(IMAGE_BYTES / 2, page as u32)
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect();
            let image = format!(
                "<svg xmlns='http://www.w3.org/2000/svg' width='8' height='8'><!-- {noise} --><rect width='8' height='8'/></svg>"
            );
            write(&format!("web/image{page}.svg"), image.as_bytes());
        }
        let images: String = (0..IMAGES)
            .map(|n| format!("<img src='image{n}.svg'>"))
            .collect();
        write(
            "web/page.html",
            format!("<!doctype html><title>evening</title><p>{images}").as_bytes(),
        );
        write(
            "Caddyfile",
            format!(
                "{{
                    admin off
                    auto_https off
                }}
                https://web.evening.test {{
                    bind {ORIGIN_V4}
                    tls {at}/web.pem {at}/web.key
                    header Cache-Control no-store
                    root * {at}/web
                    file_server
                }}
                http://files.evening.test {{
                    bind {ORIGIN_V4}
                    root * {at}/files
                    file_server
                }}
                "
            )
            .as_bytes(),
        );
        write(
            "sshd_config",
            format!(
                "Port 22\nListenAddress {ORIGIN_V4}\nHostKey {at}/host_key\nAuthorizedKeysFile {at}/user_key.pub\n\
                 PidFile none\nUsePAM no\nStrictModes no\nPermitRootLogin yes\n"
            )
            .as_bytes(),
        );
        write(
            "chrony.conf",
            format!(
                "local stratum 5\nallow\nbindaddress {ORIGIN_V4}\ncmdport 0\nbindcmdaddress /\n\
                 pidfile {at}/chronyd.pid\n"
            )
            .as_bytes(),
        );
        // A server that says nothing while it has nothing to say.
        write(
            "dovecot.conf",
            format!(
                "base_dir = /run/dovecot
                protocols = imap
                listen = {ORIGIN_V4}
                ssl = no
                disable_plaintext_auth = no
                log_path = {at}/mail.log
                first_valid_uid = 1
                mail_location = maildir:{at}/mail
                imap_idle_notify_interval = 29 mins
                service imap-login {{
                  inet_listener imaps {{
                    port = 0
                  }}
                }}
                passdb {{
                  driver = static
                  args = password={PASSWORD}
                }}
                userdb {{
                  driver = static
                  args = uid=nobody gid=nogroup home={at}/mail
                }}
                "
            )
            .as_bytes(),
        );
    }
}
