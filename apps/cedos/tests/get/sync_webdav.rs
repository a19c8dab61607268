//! `cedos sync` with WebDAV servers that nobody here wrote: Apache httpd, which lists folders (PROPFIND), and nginx, which
//! only makes them (MKCOL). Passes, saying so, where they are not installed.

use cedos_lab_rig::missing_tool::program_path;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use cedos_lab_rig::origin::{ScriptedOrigin, reply};
use cedos_lab_rig::port::HeldPort;
use cedos_lab_rig::program::{CedosRun, ProxyProcess, run};
use cedos_lab_rig::wait::until;
use tokio::io::AsyncWriteExt;

/// A WebDAV server, the folder that it serves, and its address.
struct WebdavServer {
    child: Child,
    folder: tempfile::TempDir,
    url: String,
    port: HeldPort,
}

impl Drop for WebdavServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A folder that a server of another user may write to, with `www` in it.
fn open_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for path in [folder.path().to_owned(), folder.path().join("www")] {
        std::fs::create_dir_all(&path).expect("made");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).expect("opened");
    }
    folder
}

async fn start(
    mut command: Command,
    folder: tempfile::TempDir,
    config: &str,
    port: HeldPort,
) -> WebdavServer {
    std::fs::write(folder.path().join("conf"), config).expect("written");
    let quiet = Stdio::null;
    command.stdin(quiet()).stdout(quiet()).stderr(quiet());
    let server = WebdavServer {
        child: command.spawn().expect("started"),
        url: format!("http://{}/dav", port.address()),
        folder,
        port,
    };
    until("the server listens", || {
        std::net::TcpStream::connect(server.port.address()).is_ok()
    })
    .await;
    server
}

/// Apache httpd with mod_dav.
async fn apache() -> Option<WebdavServer> {
    let program = program_path("apache2")?;
    let modules = program.parent()?.parent()?.join("lib/apache2/modules");
    let (folder, port) = (open_folder(), HeldPort::take());
    std::fs::create_dir(folder.path().join("www/dav")).expect("made");
    let www = folder.path().join("www/dav");
    std::fs::set_permissions(&www, std::fs::Permissions::from_mode(0o777)).expect("opened");
    let load = |name: &str| {
        let file = modules.join(format!("mod_{name}.so"));
        format!("LoadModule {name}_module {}\n", file.display())
    };
    let loaded: String = ["mpm_event", "authz_core", "dav", "dav_fs", "dir"]
        .map(load)
        .concat();
    let (at, address) = (folder.path().display(), port.address());
    let config = format!(
        "ServerRoot {at}\nServerName localhost\nListen {address}\nPidFile {at}/pid\nErrorLog {at}/error.log\n\
         {loaded}<IfModule unixd_module>\nUser nobody\nGroup nogroup\n</IfModule>\nDavLockDB {at}/locks\n\
         DocumentRoot {at}/www\n<Directory {at}/www>\nDav On\nRequire all granted\n</Directory>\n"
    );
    let mut command = Command::new(program);
    command.arg("-X").arg("-f").arg(folder.path().join("conf"));
    Some(start(command, folder, &config, port).await)
}

/// nginx with its own module for WebDAV, which does not list.
async fn nginx() -> Option<WebdavServer> {
    let program = program_path("nginx")?;
    let (folder, port) = (open_folder(), HeldPort::take());
    let (at, address) = (folder.path().display(), port.address());
    let config = format!(
        "daemon off; master_process off; pid {at}/pid; error_log {at}/error.log;
         events {{ worker_connections 64; }}
         http {{
           access_log off; root {at}/www; client_body_temp_path {at}/t1; proxy_temp_path {at}/t2;
           fastcgi_temp_path {at}/t3; uwsgi_temp_path {at}/t4; scgi_temp_path {at}/t5;
           server {{ listen {address}; dav_methods PUT DELETE MKCOL; }}
         }}"
    );
    let mut command = Command::new(program);
    let conf = folder.path().join("conf");
    command.arg("-p").arg(folder.path()).arg("-c").arg(conf);
    Some(start(command, folder, &config, port).await)
}

impl WebdavServer {
    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join("www/dav").join(path)
    }
}

fn write(path: &Path, content: &str) {
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
    std::fs::write(path, content).expect("written");
}

fn text(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

async fn sync(home: &Path, arguments: &[&str]) -> CedosRun {
    run(home, &[&["sync"], arguments, &["--json"]].concat()).await
}

/// Asserts how many files were transferred, unchanged, deleted and failed.
#[track_caller]
fn assert_counts(run: &CedosRun, expected: [u64; 4]) {
    let last = run.last();
    let counts = ["transferred", "unchanged", "deleted", "failed"];
    let counts = counts.map(|name| last[name].as_u64().unwrap_or(u64::MAX));
    assert_eq!(counts, expected, "{last} {}", run.errors);
}

#[tokio::test]
async fn a_folder_of_a_webdav_server_is_mirrored_by_its_listing_and_not_by_a_page() {
    let Some(server) = apache().await else {
        return;
    };
    write(&server.at("a & b.txt"), "one");
    write(&server.at("über/50%.txt"), "two");
    write(&server.at("über/empty"), "");
    let home = tempfile::tempdir().expect("a folder");
    let here = home.path().join("here");
    let mirror = [&*server.url, "here", "--delete"];
    assert_counts(&sync(home.path(), &mirror).await, [3, 0, 0, 0]);
    assert_eq!(text(&here.join("a & b.txt")), "one");
    assert_eq!(text(&here.join("über/50%.txt")), "two");
    assert_eq!(text(&here.join("über/empty")), "");
    let time = |path: &Path| {
        let modified = path.metadata().and_then(|file| file.modified());
        let since = modified
            .expect("a time")
            .duration_since(std::time::UNIX_EPOCH);
        since.expect("later").as_secs()
    };
    assert_eq!(time(&here.join("a & b.txt")), time(&server.at("a & b.txt")));
    // The listing says what changed: no file is asked for. A page of links would not be enough to delete.
    std::fs::remove_file(server.at("über/50%.txt")).expect("removed");
    write(&server.at("a & b.txt"), "changed");
    assert_counts(&sync(home.path(), &mirror).await, [1, 1, 1, 0]);
    assert_eq!(text(&here.join("a & b.txt")), "changed");
    assert!(!here.join("über/50%.txt").exists());
    // Through a proxy, which carries what is no object as a tunnel.
    let proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
    let through = [&mirror[..], &["--prox", &proxy.address]].concat();
    assert_counts(&sync(home.path(), &through).await, [0, 2, 0, 0]);
}

#[tokio::test]
async fn a_folder_is_put_to_a_webdav_server_with_its_folders_and_what_is_surplus_is_deleted() {
    let Some(server) = apache().await else {
        return;
    };
    let home = tempfile::tempdir().expect("a folder");
    let here = home.path().join("here");
    write(&here.join("a b"), "one");
    write(&here.join("d/deep/c"), "two");
    write(&here.join("d/left.out"), "three");
    std::os::unix::fs::symlink("/etc/hostname", here.join("link")).expect("linked");
    write(&server.at("new/d/old"), "old");
    write(&server.at("new/link"), "not missing here, but left out");
    for folder in ["new", "new/d"] {
        let open = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(server.at(folder), open).expect("opened");
    }
    let proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
    let url = format!("{}/new", server.url);
    let put = ["here", &url, "--prox", &proxy.address, "--exclude", "*.out"];
    let mirror = [&put[..], &["--delete"]].concat();
    let plan = sync(home.path(), &[&mirror[..], &["--dry-run"]].concat()).await;
    assert_counts(&plan, [2, 0, 1, 0]);
    assert!(server.at("new/d/old").exists(), "nothing is done");
    assert_counts(&sync(home.path(), &mirror).await, [2, 0, 1, 0]);
    assert_eq!(text(&server.at("new/a b")), "one");
    assert_eq!(text(&server.at("new/d/deep/c")), "two");
    assert!(!server.at("new/d/old").exists() && server.at("new/link").exists());
    // What the server has lost, or somebody changed there, is sent again although it did not change here.
    std::fs::remove_file(server.at("new/a b")).expect("removed");
    assert_counts(&sync(home.path(), &mirror).await, [1, 1, 0, 0]);
    assert_eq!(text(&server.at("new/a b")), "one");
    assert_counts(&sync(home.path(), &mirror).await, [0, 2, 0, 0]);
    // A folder that is empty by mistake empties no other.
    std::fs::remove_dir_all(&here).expect("removed");
    std::fs::create_dir(&here).expect("made");
    let refused = sync(home.path(), &mirror).await;
    refused.ends_with(1, "--delete would delete all 3 on the server");
    assert_eq!(text(&server.at("new/d/deep/c")), "two");
}

#[tokio::test]
async fn folders_are_made_on_a_server_that_does_not_list_them() {
    let Some(server) = nginx().await else { return };
    let home = tempfile::tempdir().expect("a folder");
    write(&home.path().join("here/d/deep/c"), "two");
    let proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
    let mirror = ["here", &server.url, "--prox", &proxy.address];
    assert_counts(&sync(home.path(), &mirror).await, [1, 0, 0, 0]);
    assert_eq!(text(&server.at("d/deep/c")), "two");
    assert_counts(&sync(home.path(), &mirror).await, [0, 1, 0, 0]);
}

#[tokio::test]
async fn nothing_is_deleted_after_a_folder_that_is_not_listed_nor_where_a_server_redirects_to() {
    const COLLECTION: &str = "<resourcetype><collection/></resourcetype>";
    let entry = |path: &str, prop: &str| {
        format!("<response><href>{path}</href><propstat><prop>{prop}</prop></propstat></response>")
    };
    let old = entry("/dav/old", "<resourcetype/>");
    let secret = entry("/dav/secret/", COLLECTION);
    for (more, words, deletions) in [
        (
            secret,
            "nothing is deleted, because not everything was listed",
            0,
        ),
        (String::new(), "redirects to another place", 1),
    ] {
        let top = entry("/dav/", COLLECTION);
        let listing = format!("<multistatus xmlns='DAV:'>{top}{old}{more}</multistatus>");
        let origin = ScriptedOrigin::play(move |asked, mut stream| {
            let listing = listing.clone();
            async move {
                let _ = asked.body(&mut stream).await;
                let answer = match (&*asked.method, &*asked.path) {
                    ("PROPFIND", "/dav/") => reply("207 Multi-Status", &[], listing.as_bytes()),
                    ("PUT", _) => reply("201 Created", &[], b""),
                    ("DELETE", "/dav/old") => {
                        reply("307 Temporary Redirect", &[("Location", "/precious")], b"")
                    }
                    _ => reply("403 Forbidden", &[], b""),
                };
                let _ = stream.write_all(&answer).await;
            }
        })
        .await;
        let home = tempfile::tempdir().expect("a folder");
        write(&home.path().join("here/b"), "b");
        let proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
        let url = origin.url("/dav");
        let mirror = ["sync", "here", &url, "--delete", "--prox", &proxy.address];
        run(home.path(), &mirror).await.ends_with(1, words);
        let deleted = (origin.requests().iter())
            .filter(|asked| asked.method == "DELETE")
            .count();
        assert_eq!(deleted, deletions, "{words}");
    }
}
