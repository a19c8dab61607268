//! `cedos key`: the keys that identify hosts.

use cedos_terminal::{print_stderr, print_stdout};
use std::path::PathBuf;

use clap::{Args, Subcommand};

pub use cedos_agent::key::{device_key_path, generate, load_device_key, read, write_new};

/// Make and show keys of devices and proxies
#[derive(Debug, Args)]
pub struct KeyArgs {
    #[command(subcommand)]
    verb: KeyVerb,
}

#[derive(Debug, Subcommand)]
enum KeyVerb {
    /// Make a new private key and print its public key
    Gen {
        /// Where to write it; without this the private key goes to stdout, the public one to stderr
        #[arg(short, long = "output", alias = "out", value_name = "FILE")]
        out: Option<PathBuf>,
        /// Print one JSON object: `public_key`, and `file` or `secret_key`
        #[arg(long)]
        json: bool,
    },
    /// Print the public key of a private key file; the default file is made if it does not exist
    Show {
        /// The private key file [default: this device's: $CEDOS_KEY_FILE or ~/.config/cedos/key]
        file: Option<PathBuf>,
        /// Print one JSON object: `public_key` and `file`
        #[arg(long)]
        json: bool,
    },
}

/// Runs `cedos key`.
///
/// # Errors
/// When a file cannot be read or written, or is not a key.
pub fn run(args: &KeyArgs) -> anyhow::Result<()> {
    match &args.verb {
        KeyVerb::Gen { out, json } => {
            let key = generate()?;
            if let Some(path) = out {
                write_new(&key, path)?;
            }
            let public_key = key.public().to_string();
            match (out, json) {
                (Some(path), true) => {
                    print_stdout(
                        &serde_json::json!({"public_key": public_key, "file": path}).to_string(),
                    );
                }
                (Some(_), false) => print_stdout(&public_key),
                (None, true) => print_stdout(
                    &serde_json::json!({"public_key": public_key, "secret_key": key.to_text()})
                        .to_string(),
                ),
                (None, false) => {
                    print_stdout(&key.to_text());
                    print_stderr(&format!("public key: {public_key}"));
                }
            }
        }
        KeyVerb::Show { file, json } => {
            let (key, file) = match file {
                Some(file) => (read(file)?, file.clone()),
                None => (load_device_key(None)?, device_key_path()?),
            };
            let public_key = key.public().to_string();
            if *json {
                print_stdout(
                    &serde_json::json!({"public_key": public_key, "file": file}).to_string(),
                );
            } else {
                print_stdout(&public_key);
            }
        }
    }
    Ok(())
}
