//! A test's own D-Bus with a stand-in for a system service (a template of python-dbusmock, which
//! others wrote from the services' documentation).

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use zbus::{Connection, Proxy};

use crate::missing_tool::skip_without;
use crate::wait::until_async;

/// A process that ends with the test.
struct BusProcess(Child);

impl Drop for BusProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The socket file of a bus, which a killed daemon leaves behind.
struct BusSocketFile(PathBuf);

impl BusSocketFile {
    /// The socket file of the bus with this address.
    fn of(address: &str) -> BusSocketFile {
        let path = address.strip_prefix("unix:path=").unwrap_or_default();
        BusSocketFile(path.split(',').next().unwrap_or_default().into())
    }
}

impl Drop for BusSocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A bus with a stand-in for a service.
pub struct ServiceBus {
    /// A connection to the bus.
    pub connection: Connection,
    address: String,
    // Dropped in this order.
    mock: BusProcess,
    daemon: BusProcess,
    _place: BusSocketFile,
}

/// Which bus a service is on.
#[derive(Clone, Copy)]
pub enum BusKind {
    /// The system bus.
    System,
    /// A user's session bus.
    Session,
}

impl ServiceBus {
    /// Starts a bus with this template, whose service on the system bus has this name. Returns
    /// `None` and prints a message if the tools are missing.
    pub async fn with(template: &str, name: &'static str) -> Option<ServiceBus> {
        ServiceBus::with_service(template, name, BusKind::System).await
    }

    /// Starts a bus with a stand-in for a service of either kind.
    pub async fn with_service(
        template: &str,
        name: &'static str,
        whose: BusKind,
    ) -> Option<ServiceBus> {
        let python = ["/usr/bin/python3", "python3"].into_iter().find(|python| {
            let asked = Command::new(python)
                .args(["-c", "import dbusmock"])
                .stderr(Stdio::null())
                .status();
            asked.is_ok_and(|status| status.success())
        });
        let daemon = Command::new("dbus-daemon")
            .args(["--session", "--nofork", "--print-address=1"])
            .stdout(Stdio::piped())
            // It prints how many descriptors it would prefer.
            .stderr(Stdio::null())
            .spawn();
        let (Some(python), Ok(mut daemon)) = (python, daemon) else {
            skip_without("dbus", "dbus-daemon or python3-dbusmock is not installed");
            return None;
        };
        let mut address = String::new();
        let stdout = daemon.stdout.take().expect("it was piped");
        let daemon = BusProcess(daemon);
        BufReader::new(stdout)
            .read_line(&mut address)
            .expect("an address");
        let address = address.trim().to_owned();
        let variable = match whose {
            BusKind::System => "DBUS_SYSTEM_BUS_ADDRESS",
            BusKind::Session => "DBUS_SESSION_BUS_ADDRESS",
        };
        let mock = Command::new(python)
            .args(["-m", "dbusmock", "--template", template])
            .env(variable, &address)
            .stdout(Stdio::null())
            .spawn()
            .expect("it was there a moment ago");
        let mock = BusProcess(mock);
        let connection = connect(&address).await;
        let names = Proxy::new(
            &connection,
            "org.freedesktop.DBus",
            "/org/freedesktop/DBus",
            "org.freedesktop.DBus",
        );
        let names = names.await.expect("a bus");
        until_async("the stand-in starts", async || {
            let is_there = names.call::<_, _, bool>("NameHasOwner", &(name,)).await;
            is_there.expect("an answer").then_some(())
        })
        .await;
        Some(ServiceBus {
            _place: BusSocketFile::of(&address),
            connection,
            address,
            mock,
            daemon,
        })
    }

    /// Opens another connection to the bus.
    pub async fn connect(&self) -> Connection {
        connect(&self.address).await
    }

    /// The address of the bus, for another process.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Ends the service; the bus continues.
    pub fn end_service(&mut self) {
        let _ = self.mock.0.kill();
        let _ = self.mock.0.wait();
    }

    /// Lets the bus answer nobody.
    pub fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Lets the bus answer again.
    pub fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.daemon.0.id().cast_signed());
        kill(pid, signal).expect("it runs");
    }

    /// The inhibitors at logind's stand-in: what, who, why, mode.
    pub async fn inhibitors(&self) -> Vec<[String; 4]> {
        type Row = (String, String, String, String, u32, u32);
        let manager = Proxy::new(
            &self.connection,
            "org.freedesktop.login1",
            "/org/freedesktop/login1",
            "org.freedesktop.login1.Manager",
        );
        let manager = manager.await.expect("a proxy");
        let rows: Vec<Row> = manager.call("ListInhibitors", &()).await.expect("a list");
        let row = |(what, who, why, how, ..): Row| [what, who, why, how];
        rows.into_iter().map(row).collect()
    }

    /// The stand-in's control interface, on one of its objects.
    pub async fn mock(&self, name: &'static str, path: &'static str) -> Proxy<'static> {
        let mock = Proxy::new(&self.connection, name, path, "org.freedesktop.DBus.Mock");
        mock.await.expect("a proxy")
    }
}

async fn connect(address: &str) -> Connection {
    let bus = zbus::connection::Builder::address(address);
    bus.build().await.expect("a connection")
}
