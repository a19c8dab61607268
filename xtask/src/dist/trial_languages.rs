//! The trial of the packages for other languages: each fetches through a proxy.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::Result;

use super::bindings::{GO_MODULE, go_file, only};
use super::context::call;
use super::debian::{DebianTrial, end};
use super::trial_network::NetworkEnd;
use crate::repository::root;

impl DebianTrial<'_> {
    pub fn wheel(&mut self) -> Result<()> {
        let wheel = only(&self.context.out, "d2tp-", ".whl")?;
        let folder = self.context.scratch("wheel-try")?;
        let environment = folder.join("venv");
        call(
            Command::new("python3")
                .args(["-m", "venv"])
                .arg(&environment),
        )?;
        let mut pip = Command::new(environment.join("bin/pip"));
        call(pip.args(["install", "--quiet", "--no-index"]).arg(&wheel))?;
        let program = environment.join("bin/python");
        self.language(
            &folder,
            &[program.as_os_str(), "-c".as_ref(), PYTHON.as_ref()],
        )
    }

    pub fn npm(&mut self) -> Result<()> {
        let package = only(&self.context.out, "d2tp-", ".tgz")?;
        let folder = self.context.scratch("npm-try")?;
        fs::write(folder.join("package.json"), "{}")?;
        let mut npm = Command::new("npm");
        npm.args(["install", "--silent", "--offline", "--no-audit"])
            .arg(&package);
        call(npm.current_dir(&folder))?;
        fs::write(folder.join("try.js"), NODE)?;
        let script = folder.join("try.js");
        self.language(&folder, &["node".as_ref(), script.as_os_str()])
    }

    pub fn go(&mut self) -> Result<()> {
        let folder = self.context.scratch("go-try")?;
        call(
            Command::new("tar")
                .arg("-C")
                .arg(&folder)
                .arg("-xzf")
                .arg(go_file(self.context)),
        )?;
        let prefix = folder.join("prefix");
        let mut install = Command::new("sh");
        install
            .arg(root().join("edge/capi/install.sh"))
            .arg(&prefix);
        call(
            install
                .env("LIBRARIES", self.context.built(None))
                .stderr(Stdio::null()),
        )?;
        fs::write(folder.join("main.go"), GO)?;
        let version = format!("v{}", self.context.version);
        fs::write(
            folder.join("go.mod"),
            format!("module try\n\ngo 1.21\n\nrequire {GO_MODULE} {version}\n"),
        )?;
        let go = |arguments: &[&str]| {
            let mut go = Command::new("go");
            go.args(arguments).current_dir(&folder);
            go.env(
                "GOPROXY",
                format!("file://{}", folder.join("proxy").display()),
            );
            go.env("GOFLAGS", "-mod=mod -modcacherw")
                .env("GONOSUMDB", "*")
                .env("GONOSUMCHECK", "1");
            go.env("GOMODCACHE", folder.join("modules"));
            go.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
            call(&mut go)
        };
        go(&["build", "-o", "try", "."])?;
        let library = format!("LD_LIBRARY_PATH={}", prefix.join("lib").display());
        let program = folder.join("try");
        self.language(
            &folder,
            &["env".as_ref(), library.as_ref(), program.as_os_str()],
        )
    }

    /// Runs a program of a language at the device's end, through a proxy; it must print the small
    /// file.
    pub fn language(&self, folder: &Path, words: &[&std::ffi::OsStr]) -> Result<()> {
        let prox = self.program()?;
        let state = folder.join("state");
        let (proxy, address) = self.proxy_of(
            &[prox.as_os_str(), "prox".as_ref()],
            &state.display().to_string(),
        )?;
        let mut program = self.network.enter(NetworkEnd::Device);
        program.args(words).current_dir(folder);
        program
            .env("HOME", folder)
            .env("XDG_CONFIG_HOME", folder)
            .env("CEDOS_AGENT", "none");
        let held = self.page(program.env("CEDOS_PROX", &address));
        end(proxy)?;
        held
    }
}

const PYTHON: &str = "\
import d2tp
with d2tp.connect(('198.51.100.1', 80), timeout=60) as sock:
    sock.sendall(b'GET /small HTTP/1.0\\r\\nHost: x\\r\\n\\r\\n')
    while data := sock.recv(65536):
        print(data.decode(), end='')
";

const NODE: &str = "\
const d2tp = require('d2tp');
const agent = d2tp.agent({ proxy: process.env.CEDOS_PROX });
require('http').get('http://198.51.100.1/small', { agent }, (answer) => answer.pipe(process.stdout));
";

const GO: &str = r#"package main

import (
	"fmt"
	"io"
	"log"
	"net/http"

	d2tp "github.com/cedos/cedos/bindings/go"
)

func main() {
	client := http.Client{Transport: &http.Transport{DialContext: (&d2tp.Dialer{}).DialContext}}
	answer, err := client.Get("http://198.51.100.1/small")
	if err != nil {
		log.Fatal(err)
	}
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(string(body))
}
"#;
