//! Programs told apart by their cgroup. Skipped where the test may not make one.

use std::io::Read;
use std::net::{TcpStream, UdpSocket};
use std::path::{Path, PathBuf};

use cedos_lab_rig::namespace::{in_namespace_with, sh};
use cedos_lab_rig::program::pid_of;
use cedos_lab_rig::wait::until_async;
use cedos_lab_rig::{PATIENCE, this_test};
use nix::sys::signal::{Signal, kill};

use crate::scene::{
    OBSERVER, OBSERVER_PORT, OUTSIDE, OUTSIDE_IPV6, SERVER_IPV6, Scene, TUNNEL, ask,
    system_network, udp,
};
use crate::tunnel::{end, status};

/// The device's own address on the Wi-Fi.
const OWN: &str = "198.51.100.7";
const OWN_IPV6: &str = "2001:db8::7";

/// A cgroup of this test, which is gone with it.
struct TestCgroup {
    root: PathBuf,
    directory: PathBuf,
}

impl TestCgroup {
    /// Makes a cgroup. `None` where that is not allowed, or there are none of version 2.
    fn make() -> Option<TestCgroup> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("readable");
        let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "));
        let root = PathBuf::from(mount?.split(' ').nth(4)?);
        let name = format!("cedos-test-{}", std::process::id());
        let directory = root.join(name);
        let made = std::fs::create_dir_all(directory.join("below"));
        let cgroup = TestCgroup { root, directory };
        let enters = made.is_ok() && enter(&cgroup.directory) && enter(&cgroup.root);
        if !enters {
            eprintln!("skipped: this test may not make a cgroup");
        }
        enters.then_some(cgroup)
    }

    /// The cgroup as an option has it.
    fn path(&self) -> String {
        let path = self.directory.strip_prefix(&self.root);
        path.expect("below").display().to_string()
    }

    /// What `act` returns while this process is in a cgroup below it.
    fn within<T>(&self, act: impl FnOnce() -> T) -> T {
        assert!(enter(&self.directory.join("below")));
        let acted = act();
        assert!(enter(&self.root));
        acted
    }
}

impl Drop for TestCgroup {
    fn drop(&mut self) {
        enter(&self.root);
        let _ = std::fs::remove_dir(self.directory.join("below"));
        let _ = std::fs::remove_dir(&self.directory);
    }
}

/// Moves this process. A socket belongs to the cgroup that its process is in when it is made.
fn enter(cgroup: &Path) -> bool {
    std::fs::write(cgroup.join("cgroup.procs"), std::process::id().to_string()).is_ok()
}

/// The address that a host behind the router sees of this one over TCP.
fn seen() -> String {
    seen_by(OBSERVER)
}

/// The address that a host sees of this one over TCP.
fn seen_by(host: &str) -> String {
    let mut stream = TcpStream::connect((host, OBSERVER_PORT)).expect("connected");
    stream
        .set_read_timeout(Some(PATIENCE))
        .expect("a length of time");
    let mut address = String::new();
    stream.read_to_string(&mut address).expect("an answer");
    address
}

/// The address that a host sees of this one over UDP.
fn seen_over_udp() -> String {
    let socket = UdpSocket::bind("0.0.0.0:0").expect("a port");
    socket.connect((OBSERVER, 7)).expect("a route");
    socket
        .set_read_timeout(Some(PATIENCE))
        .expect("a length of time");
    socket.send(b"who").expect("taken by the kernel");
    let mut bytes = [0; 64];
    let n = socket.recv(&mut bytes).expect("an answer");
    String::from_utf8_lossy(&bytes[..n]).into_owned()
}

/// Packets are refused that come from another link than answers would leave by: as some distributions have it.
fn strict_reverse_paths() {
    sh("echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter");
}

#[test]
fn programs_of_a_cgroup_that_is_excluded_go_around_the_tunnel() {
    in_namespace_with(TUNNEL, this_test!(), || async {
        let Some(cgroup) = TestCgroup::make() else {
            return;
        };
        let scene = Scene::start().await;
        strict_reverse_paths();
        let before = system_network();
        assert_eq!(seen(), OWN);
        let option = format!("cgroup:{}", cgroup.path());
        let mut vpn = scene.up(&["--exclude", &option, "--kill-switch"]).await;
        assert_ne!(seen(), OWN);
        assert_eq!(cgroup.within(seen), OWN);
        assert_eq!(cgroup.within(seen_over_udp), OWN);
        assert_eq!(ask(&udp("198.18.0.2:7"), b"in").0, b"in");
        kill(pid_of(&vpn.child), Signal::SIGKILL).expect("send");
        vpn.child.wait().await.expect("it ends");
        // What is excluded may leave, and nothing else.
        assert_eq!(cgroup.within(seen), OWN);
        assert!(TcpStream::connect((OBSERVER, OBSERVER_PORT)).is_err());
        let vpn = scene.up(&[]).await;
        assert_ne!(cgroup.within(seen), OWN);
        end(&scene, vpn).await;
        assert_eq!(system_network(), before);
    });
}

#[test]
fn programs_of_a_cgroup_that_is_included_alone_go_in_and_lans_stay_outside() {
    in_namespace_with(TUNNEL, this_test!(), || async {
        let Some(cgroup) = TestCgroup::make() else {
            return;
        };
        let scene = Scene::start().await;
        strict_reverse_paths();
        sh("ip -6 addr add 2001:db8::7/64 dev wlan0 nodad; ip -6 route add default dev wlan0");
        let before = system_network();
        let option = format!("cgroup:{}", cgroup.path());
        let vpn = scene.up(&["--include", &option]).await;
        assert_eq!(seen(), OWN);
        assert_eq!(seen_over_udp(), OWN);
        assert_ne!(cgroup.within(seen), OWN);
        let within = || ask(&udp("198.18.0.2:7"), b"in").0;
        assert_eq!(cgroup.within(within), b"in");
        // The LAN is outside for it, too, and IPv6 without an inner address is refused.
        assert_eq!(cgroup.within(|| seen_by(OUTSIDE)), OWN);
        assert!(TcpStream::connect((OUTSIDE_IPV6, 80)).is_ok());
        let six = cgroup.within(|| TcpStream::connect((OUTSIDE_IPV6, 80)));
        assert!(six.is_err());
        end(&scene, vpn).await;
        assert_eq!(system_network(), before);
    });
}

#[test]
fn ipv6_of_programs_goes_around_the_tunnel_or_alone_into_it() {
    in_namespace_with(TUNNEL, this_test!(), || async {
        let Some(cgroup) = TestCgroup::make() else {
            return;
        };
        let scene = Scene::start_with("10.83.0.0/16,fd83::/64").await;
        sh("ip -6 addr add 2001:db8::7/64 dev wlan0 nodad; ip -6 route add default dev wlan0");
        let before = system_network();
        let option = format!("cgroup:{}", cgroup.path());
        let seen_by_six = || seen_by(OUTSIDE_IPV6);
        assert_eq!(seen_by_six(), OWN_IPV6);
        let vpn = scene.up(&["--exclude", &option, "--kill-switch"]).await;
        assert_ne!(seen_by_six(), OWN_IPV6);
        assert_eq!(cgroup.within(seen_by_six), OWN_IPV6);
        end(&scene, vpn).await;
        let vpn = scene.up(&["--include", &option]).await;
        assert_eq!(seen_by_six(), OWN_IPV6);
        assert_ne!(cgroup.within(seen_by_six), OWN_IPV6);
        let within = || ask(&udp(&format!("[{SERVER_IPV6}]:7")), b"in").0;
        assert_eq!(cgroup.within(within), b"in");
        end(&scene, vpn).await;
        let rule = format!("cgroup {} = free-only", cgroup.path());
        let vpn = scene.up(&["--rule", &rule]).await;
        cgroup.within(seen_by_six);
        seen_by_six();
        let counts = until_async("both are counted", async || {
            let now = status(&scene).await;
            let rules = &now["vpn"]["rules"];
            let counts = [0, 1].map(|at| rules[at]["connections"]["total"].as_u64());
            let count: u64 = counts.iter().flatten().sum();
            (count >= 2).then_some(counts)
        })
        .await;
        assert_eq!(counts, [Some(1), Some(1)]);
        end(&scene, vpn).await;
        assert_eq!(system_network(), before);
    });
}

#[test]
fn a_rule_for_a_cgroup_decides_over_its_connections() {
    in_namespace_with(TUNNEL, this_test!(), || async {
        let Some(cgroup) = TestCgroup::make() else {
            return;
        };
        let scene = Scene::start().await;
        let rule = format!("cgroup {} = free-only", cgroup.path());
        let vpn = scene
            .up(&["--rule", &rule, "--rule", "port 81 = any"])
            .await;
        cgroup.within(seen);
        seen();
        seen();
        let counts = until_async("all are counted", async || {
            let now = status(&scene).await;
            let rules = &now["vpn"]["rules"];
            let counts = [0, 1, 2].map(|at| rules[at]["connections"]["total"].as_u64());
            let count: u64 = counts.iter().flatten().sum();
            (count >= 3).then_some(counts)
        })
        .await;
        assert_eq!(counts, [Some(1), Some(2), Some(0)]);
        end(&scene, vpn).await;
    });
}

#[test]
fn a_cgroup_that_is_not_there_is_told_in_a_sentence() {
    in_namespace_with(TUNNEL, this_test!(), || async {
        let scene = Scene::start().await;
        let more = [
            "--prox",
            &scene.address,
            "--exclude",
            "cgroup:no-such.slice",
        ];
        let (code, said) = scene.vpn("up", &more).await;
        assert_eq!(code, 1, "{said}");
        assert!(said.contains("no-such.slice"), "{said}");
    });
}
