//! Runs a command on the device of a scenario: `in_lab FILE CMD…`.

use cedos_lab_emu::{World, enter};
use cedos_lab_scenario::Scenario;
use std::process::{Command, ExitCode};

fn main() -> anyhow::Result<ExitCode> {
    enter()?;
    let mut arguments = std::env::args().skip(1);
    let (Some(file), Some(program)) = (arguments.next(), arguments.next()) else {
        anyhow::bail!("usage: in_lab FILE CMD…");
    };
    let mut world = World::build(Scenario::load(file.as_ref())?)?;
    world.start_origin()?;
    world.start(|happening| {
        let at = happening.at.as_secs_f64();
        eprintln!("{at:8.3} s  {}  {:?}", happening.link, happening.event.kind);
    })?;
    let mut command = Command::new(program);
    command.args(arguments);
    let ended = world.device().spawn(command)?.wait()?;
    eprintln!("{:#?}", world.seen().links);
    eprintln!("{:?}", world.seen().switches);
    eprintln!("{:#?}", world.seen().carried);
    Ok(ExitCode::from(ended.code().unwrap_or(1) as u8))
}
