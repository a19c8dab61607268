//! The folder of a run: the origin's files, generated programs, and their results; and the lab, in
//! which scripts find the folder as `$AT`.

use crate::repro::emulated::{D2TP, commanded_beside_an_origin};
use anyhow::Context;
use cedos_lab_emu::{content, plan, web};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// The seed of the served content and of random values.
pub const SEED: u64 = 11;
/// The size of a file that takes longer than the links are up before an outage.
pub const FILE_BYTES: u64 = 6_000_000;
/// The number of equal files into which the object is divided in a folder.
pub const PARTS: u64 = 10;
/// The number of objects of a page, and the bytes of each.
pub const OBJECTS: u64 = 60;
pub const OBJECT_BYTES: u64 = 50_000;
/// The length of a film in seconds; its packets and frames follow.
pub const CLIP_S: u32 = 90;

/// The folders of programs that are not in ordinary users' paths. // Debian
const SBIN: [&str; 2] = ["/usr/sbin", "/usr/local/sbin"];

const FILES: [(&str, &str); 9] = [
    ("fetch.c", include_str!("../programs/fetch.c")),
    ("fetch.go", include_str!("../programs/fetch.go")),
    ("fetch.rs", include_str!("../programs/fetch.rs")),
    ("Fetch.java", include_str!("../programs/Fetch.java")),
    ("keys.py", include_str!("../programs/keys.py")),
    ("browse.sh", include_str!("../programs/browse.sh")),
    ("played.lua", include_str!("../programs/played.lua")),
    ("nginx.conf", include_str!("../programs/nginx.conf")),
    ("www/page.html", include_str!("../programs/page.html")),
];

const ORIGIN_SCRIPT: &str = include_str!("../programs/origin.sh");

const SSHD: &str = "Port 2222
ListenAddress $ORIGIN
HostKey $AT/host_key
AuthorizedKeysFile $AT/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
";

const SSH: &str = "Host lab
HostName $ORIGIN
Port 2222
IdentityFile $AT/user_key
IdentitiesOnly yes
BatchMode yes
UserKnownHostsFile $AT/known_hosts
GlobalKnownHostsFile /dev/null
StrictHostKeyChecking yes
# A key is to be sent when it is typed.
IgnoreUnknown ObscureKeystrokeTiming
ObscureKeystrokeTiming no
";

/// The script that creates what ssh and its server need.
pub const SSH_MAKE: &str = "[ -f $AT/user_key ] || {
    ssh-keygen -q -t ed25519 -N '' -C lab -f $AT/user_key && ssh-keygen -q -t ed25519 -N '' -C lab -f $AT/host_key &&
    echo \"[$ORIGIN]:2222 $(cat $AT/host_key.pub)\" >$AT/known_hosts; }";

/// The script that creates the film.
pub const CLIP_MAKE: &str = "[ -f $AT/www/clip.webm ] || ffmpeg -v error -f lavfi \
    -i testsrc2=size=480x270:rate=25:duration=$CLIP_S -f lavfi -i sine=frequency=300:duration=$CLIP_S \
    -vf noise=alls=30:allf=t -c:v libvpx -deadline realtime -cpu-used 8 -b:v 1600k -minrate 1600k -maxrate 1600k \
    -g 50 -c:a libopus -b:a 48k -f webm $AT/www/clip.webm";

/// The script that creates a repository with the file, in the form that a plain web server can
/// serve.
pub const GIT_MAKE: &str = "export HOME=$AT GIT_CONFIG_NOSYSTEM=1 && git init -q $AT/work && \
    cp $AT/www/file $AT/work/file && git -C $AT/work add . && \
    git -C $AT/work -c user.name=a -c user.email=a@a.example commit -qm file && \
    git clone -q --bare $AT/work $AT/www/repo.git && git -C $AT/www/repo.git update-server-info";

/// The folder of a run.
pub struct ProgramFolder {
    folder: TempDir,
    cedos: String,
}

impl ProgramFolder {
    /// Creates the folder, with everything that needs no other program.
    ///
    /// # Errors
    /// There is not enough space.
    pub fn new() -> anyhow::Result<ProgramFolder> {
        let folder = tempfile::tempdir().context("no temporary folder")?;
        let program = std::env::current_exe().context("cannot find this program's own path")?;
        let site = ProgramFolder {
            folder,
            cedos: program.display().to_string(),
        };
        for inner in ["www/object", "www/tree"] {
            fs::create_dir_all(site.at().join(inner))?;
        }
        for (name, text) in FILES {
            fs::write(site.at().join(name), site.filled(text, ""))?;
        }
        fs::write(site.at().join("sshd_config"), site.filled(SSHD, ""))?;
        fs::write(site.at().join("ssh_config"), site.filled(SSH, ""))?;
        web::write_content(&site.at().join("www/file"), SEED, FILE_BYTES)?;
        for (folder, count, bytes) in [
            ("object", OBJECTS, OBJECT_BYTES),
            ("tree", PARTS, FILE_BYTES / PARTS),
        ] {
            for n in 0..count {
                let file = site.at().join(format!("www/{folder}/{n}"));
                fs::write(file, piece(n, bytes))?;
            }
        }
        Ok(site)
    }

    /// The path of the folder.
    pub fn at(&self) -> &Path {
        self.folder.path()
    }

    /// The file that a program wrote; empty if there is none.
    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.at().join(name)).unwrap_or_default()
    }

    /// The contents of a file of the site, as text.
    pub fn text(&self, name: &str) -> String {
        String::from_utf8_lossy(&self.read(name)).into_owned()
    }

    /// The text with its variables replaced by paths.
    pub fn filled(&self, text: &str, program: &str) -> String {
        let shown = self.at().display();
        text.replace("$RUN", &format!("{} run --", self.cedos))
            .replace("$CEDOS run", &format!("{} run", self.cedos))
            .replace("$AT", &shown.to_string())
            .replace("$OUT", &format!("{shown}/{program}.out"))
            .replace("$ORIGIN", &plan::ORIGIN_V4.to_string())
            .replace("$CLIP_S", &CLIP_S.to_string())
    }

    /// Checks that programs are installed, and creates the necessary files.
    ///
    /// # Errors
    /// What is missing.
    pub fn make(&self, needs: &[&str], makes: &[&str]) -> Result<(), String> {
        let path = search_path();
        for needed in needs {
            match *needed {
                "root" if !nix::unistd::geteuid().is_root() => {
                    return Err("it takes root here".to_owned());
                }
                "root" => {}
                _ if !std::env::split_paths(&path).any(|folder| folder.join(needed).is_file()) => {
                    return Err(format!("{needed} is not installed here"));
                }
                _ => {}
            }
        }
        for make in makes {
            let made = Command::new("sh")
                .args(["-c", &self.filled(make, "")])
                .env("PATH", &path)
                .stdin(Stdio::null())
                .output()
                .map_err(|error| error.to_string())?;
            if !made.status.success() {
                let errors = String::from_utf8_lossy(&made.stderr);
                let last = errors.lines().next_back().unwrap_or_default();
                return Err(format!("it cannot be made here: {last}"));
            }
        }
        Ok(())
    }

    /// Runs the shell script `script` on the device while this scenario runs and the origin has its
    /// servers.
    ///
    /// # Errors
    /// There is no lab, or it could not follow its scenario.
    pub fn lab(&self, scenario: &str, script: &str) -> anyhow::Result<()> {
        // Each server reports in its own file that it listens.
        let mut servers = Vec::new();
        if self.make(&["nginx"], &[]).is_ok() {
            servers.push("front");
        }
        if self.at().join("host_key").exists() {
            servers.push("sshd.said");
        }
        for file in &servers {
            let _ = fs::remove_file(self.at().join(file));
        }
        let variables = [
            ("AT", self.at().display().to_string()),
            ("CEDOS", self.cedos.clone()),
            ("ORIGIN", plan::ORIGIN_V4.to_string()),
            ("SERVERS", servers.join(" ")),
            ("PATH", search_path().to_string_lossy().into_owned()),
        ];
        let script = format!("{BEGIN}{script}\nexit 0\n");
        commanded_beside_an_origin(scenario, D2TP, Some(ORIGIN_SCRIPT), &script, &variables)?;
        Ok(())
    }
}

/// The beginning of every script, which sets its variables.
const BEGIN: &str = r#"
export CEDOS_PROX="$CEDOS_LAB_PROX"
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY no_proxy NO_PROXY LD_PRELOAD
now() { date +%s.%N; }
now >"$AT/zero"
for server in $SERVERS; do
    tries=0
    until grep -Eq 'is d2tp|listening' "$AT/$server" 2>/dev/null; do
        if [ $((tries += 1)) -gt 400 ]; then
            echo "the origin's server does not listen after 20 s: $(tail -n 1 "$AT/$server")" >&2
            exit 1
        fi
        sleep 0.05
    done
done
"#;

/// The script that starts an agent with a proxy for programs, `$agent`, and waits until it listens;
/// `$AGENT_PROXY` is its address.
pub const AGENT: &str = r#"
export AGENT_PROXY=127.0.0.1:1080
env HOME="$AT" XDG_STATE_HOME="$AT/state" XDG_CONFIG_HOME="$AT/config" XDG_CACHE_HOME="$AT/cache" XDG_RUNTIME_DIR= CEDOS_AGENT="$AT/agent.sock" "$CEDOS" agent --no-notifications --proxy $AGENT_PROXY --prox "$CEDOS_PROX" 2>"$AT/agent.errors" & agent=$!
tries=0
until grep -q 'proxy for programs' "$AT/agent.errors" || [ $((tries += 1)) -gt 100 ]; do sleep 0.1; done
"#;

fn search_path() -> std::ffi::OsString {
    let mut folders: Vec<PathBuf> =
        std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect();
    folders.extend(SBIN.map(PathBuf::from));
    std::env::join_paths(folders).unwrap_or_default()
}

fn piece(n: u64, bytes: u64) -> Vec<u8> {
    let mut piece = vec![0; bytes as usize];
    content::fill(SEED, n * bytes, &mut piece);
    piece
}

/// The checksum that a page must report for its objects.
pub fn page_sum(objects: u64) -> u32 {
    let each = (0..objects).map(|n| adler32(&piece(n, OBJECT_BYTES)).wrapping_mul(n as u32 + 1));
    each.fold(0, u32::wrapping_add)
}

/// Adler-32 (RFC 1950 §8.2).
fn adler32(bytes: &[u8]) -> u32 {
    let (a, b) = bytes.iter().fold((1_u32, 0_u32), |(a, b), byte| {
        let a = (a + u32::from(*byte)) % 65_521;
        (a, (b + a) % 65_521)
    });
    b << 16 | a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_objects_sum_is_adler_32() {
        assert_eq!(adler32(b"Wikipedia"), 0x11e6_0398);
    }

    #[test]
    fn the_parts_of_a_folder_are_the_file() {
        let parts: Vec<u8> = (0..PARTS)
            .flat_map(|n| piece(n, FILE_BYTES / PARTS))
            .collect();
        let mut whole = vec![0; FILE_BYTES as usize];
        content::fill(SEED, 0, &mut whole);
        assert!(parts == whole);
    }
    #[test]
    fn the_web_server_has_a_port_that_the_lab_leaves_free() {
        let (_, settings) = FILES
            .iter()
            .find(|(name, _)| *name == "nginx.conf")
            .unwrap();
        let (_, rest) = settings.split_once("listen $ORIGIN:").unwrap();
        let (port, _) = rest.split_once(';').unwrap();
        assert_ne!(port.parse(), Ok(plan::PORTAL_PORT));
    }
}
