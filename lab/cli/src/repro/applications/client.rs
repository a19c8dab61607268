//! The clients: ours and others, called as their users call them.
//!
//! Calls are for a shell on the lab's device, in their own folder, which is also their home: `$URL`
//! is the object or the destination of an upload, `$FILE` the file to upload, `out` the downloaded
//! file, `$CEDOS` this program. A download is complete if the exit code says so. `lab/repro/C10.toml`
//! describes each client in a sentence.

use super::cell::CellDirection;
use super::disturbance::Disturbance;

/// A program and its calls.
pub struct Client {
    /// The client's name in the name of a cell.
    pub name: &'static str,
    /// Whether the client is a program of this project.
    pub ours: bool,
    /// The programs that the client needs.
    needs: &'static [&'static str],
    /// The command that is run before the transfer.
    pub prepare: &'static str,
    down: ClientCall,
    /// The call that uploads; `None` if the client cannot.
    up: Option<ClientCall>,
    /// The disturbances with which the client is run.
    disturbed_by: &'static [Disturbance],
}

/// A call, and its user's retry after a failure.
#[derive(Clone, Copy)]
pub struct ClientCall {
    /// The command line of the first call.
    pub first: &'static str,
    /// The command line of the retry, once the network is back.
    pub by_hand: &'static str,
}

const fn call(first: &'static str, by_hand: &'static str) -> ClientCall {
    ClientCall { first, by_hand }
}

const ALL: &[Disturbance] = &Disturbance::ALL;

macro_rules! ours {
    ($through:literal, $more:literal) => {
        concat!(
            $through,
            "\"$CEDOS\" get --alone --json --link wlan0=free --link wwan0*=metered ",
            $more,
            " -o out \"$URL\""
        )
    };
}
const THROUGH: &str = ours!("CEDOS_PROX=\"$CEDOS_LAB_PROX\" ", "");
const DIRECT: &str = ours!("", "");
const FREE_ONLY: &str = ours!("CEDOS_PROX=\"$CEDOS_LAB_PROX\" ", "--policy free-only");
const ANY: &str = ours!("CEDOS_PROX=\"$CEDOS_LAB_PROX\" ", "--policy any");
const PUT: &str = "CEDOS_PROX=\"$CEDOS_LAB_PROX\" \"$CEDOS\" put --alone --json \
                   --link wlan0=free --link wwan0*=metered \"$FILE\" \"$URL\"";

const GPO: &str = "gpo download; whole=$(find down -type f -name '*.bin'); \
                   [ -n \"$whole\" ] && cp \"$whole\" out";
/// A feed with one episode, served by this machine, so that only the download is disturbed.
const FEED: &str = r#"
mkdir feed
cat >feed/feed.xml <<FEED
<?xml version="1.0"?><rss version="2.0"><channel><title>Lab</title><description>One episode</description>
<link>http://127.0.0.1:8099/</link><item><title>Episode</title><guid>1</guid>
<enclosure url="$URL" length="$BYTES" type="audio/mpeg"/></item></channel></rss>
FEED
python3 -m http.server 8099 --bind 127.0.0.1 --directory feed & echo $! >server
tries=0
until gpo subscribe http://127.0.0.1:8099/feed.xml | grep added || [ $((tries += 1)) -gt 9 ]; do sleep 0.5; done
gpo update
"#;
const BROWSER: &str = "python3 ../browser.py chromium \"$URL\" \"$PWD\" out";

/// Every client, in the order of the table.
pub const CLIENTS: &[Client] = &[
    Client {
        name: "cedos",
        ours: true,
        needs: &[],
        prepare: "",
        down: call(THROUGH, THROUGH),
        up: Some(call(PUT, PUT)),
        disturbed_by: ALL,
    },
    Client {
        name: "cedos-direct",
        ours: true,
        needs: &[],
        prepare: "",
        down: call(DIRECT, DIRECT),
        up: None,
        disturbed_by: ALL,
    },
    Client {
        name: "cedos-free-only",
        ours: true,
        needs: &[],
        prepare: "",
        down: call(FREE_ONLY, FREE_ONLY),
        up: None,
        disturbed_by: &[Disturbance::Cellular],
    },
    Client {
        name: "cedos-any",
        ours: true,
        needs: &[],
        prepare: "",
        down: call(ANY, ANY),
        up: None,
        disturbed_by: &[Disturbance::Cellular],
    },
    Client {
        name: "curl",
        ours: false,
        needs: &["curl"],
        prepare: "",
        down: call("curl -sS -o out \"$URL\"", "curl -sS -C - -o out \"$URL\""),
        up: Some(call(
            "curl -sS -T \"$FILE\" -o out \"$URL\"",
            "curl -sS -T \"$FILE\" -o out \"$URL\"",
        )),
        disturbed_by: ALL,
    },
    Client {
        name: "curl-retry",
        ours: false,
        needs: &["curl"],
        prepare: "",
        down: call(
            "curl -sS --retry 1000 --retry-all-errors --retry-delay 2 --speed-limit 1 --speed-time 15 \
             -C - -o out \"$URL\"",
            "curl -sS -C - -o out \"$URL\"",
        ),
        up: None,
        disturbed_by: ALL,
    },
    Client {
        name: "wget",
        ours: false,
        needs: &["wget"],
        prepare: "",
        down: call("wget -q -O out \"$URL\"", "wget -q -c -O out \"$URL\""),
        up: Some(call(
            "wget -q --method=PUT --body-file=\"$FILE\" -O out \"$URL\"",
            "wget -q --method=PUT --body-file=\"$FILE\" -O out \"$URL\"",
        )),
        disturbed_by: ALL,
    },
    Client {
        name: "aria2",
        ours: false,
        needs: &["aria2c"],
        prepare: "",
        down: call(
            "aria2c -q --no-conf -o out \"$URL\"",
            "aria2c -q --no-conf -c -o out \"$URL\"",
        ),
        up: None,
        disturbed_by: ALL,
    },
    Client {
        name: "gpodder",
        ours: false,
        needs: &["gpo", "python3"],
        prepare: FEED,
        down: call(GPO, GPO),
        up: None,
        disturbed_by: ALL,
    },
    Client {
        name: "chromium",
        ours: false,
        needs: &["chromium", "python3"],
        prepare: "",
        down: call(BROWSER, BROWSER),
        up: None,
        disturbed_by: ALL,
    },
];

impl Client {
    /// The call for a transfer in this direction; `None` if the client does not support it.
    pub fn call(&self, way: CellDirection) -> Option<ClientCall> {
        match way {
            CellDirection::Down => Some(self.down),
            CellDirection::Up => self.up,
        }
    }

    /// Whether the client is run with this disturbance.
    pub fn is_disturbed_by(&self, disturbance: Disturbance) -> bool {
        self.disturbed_by.contains(&disturbance)
    }

    /// A program that it needs and this machine lacks.
    pub fn lacks(&self) -> Option<&'static str> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let there = |program: &str| std::env::split_paths(&path).any(|p| p.join(program).is_file());
        self.needs.iter().copied().find(|needed| !there(needed))
    }
}
