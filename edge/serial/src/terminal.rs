//! Serial devices of the system: opened raw, at a bit rate, for one program.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::termios::{ControlModes, OptionalActions, SpecialCodeIndex};

use crate::line::SerialLine;
use crate::port::OpenLineError;

/// Opens a line's device.
pub(crate) fn open(line: &SerialLine) -> Result<OwnedFd, OpenLineError> {
    let device = line.device.display().to_string();
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open(&line.device, flags, Mode::empty());
    let opened = opened.map_err(|cause| OpenLineError::Io {
        device: device.clone(),
        hint: hint(cause),
        cause: cause.into(),
    })?;
    if rustix::fs::flock(&opened, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Err(OpenLineError::InUse { device });
    }
    set_raw(&opened, line.baud).map_err(|cause| OpenLineError::Io {
        device,
        hint: match cause.kind() {
            io::ErrorKind::Unsupported => "",
            _ if !rustix::termios::isatty(&opened) => ": it is no serial device",
            _ => ": the device does not have this bit rate",
        },
        cause,
    })?;
    Ok(opened)
}

fn hint(cause: rustix::io::Errno) -> &'static str {
    match cause {
        rustix::io::Errno::NOENT => ". Is it plugged in? `ls /dev/tty*` shows what there is",
        rustix::io::Errno::ACCESS | rustix::io::Errno::PERM => {
            ". Members of the group `dialout` may use serial devices"
        }
        _ => "",
    }
}

/// Sets eight bits without parity, no flow control, nothing interpreted.
fn set_raw(device: &OwnedFd, baud: u32) -> io::Result<()> {
    let mut mode = rustix::termios::tcgetattr(device)?;
    mode.make_raw();
    // The modem's lines say nothing of the air: a line without them works too.
    mode.control_modes |= ControlModes::CLOCAL | ControlModes::CREAD;
    mode.control_modes &= !(ControlModes::CSTOPB | ControlModes::CRTSCTS);
    mode.special_codes[SpecialCodeIndex::VMIN] = 1;
    mode.special_codes[SpecialCodeIndex::VTIME] = 0;
    mode.set_speed(baud)?;
    rustix::termios::tcsetattr(device, OptionalActions::Now, &mode)?;
    // What arrived before, at another rate perhaps, is noise.
    rustix::termios::tcflush(device, rustix::termios::QueueSelector::IOFlush)?;
    Ok(())
}

/// Bytes that the device has not sent yet; `None` if it does not say.
pub(crate) fn queued_bytes(device: BorrowedFd<'_>) -> Option<usize> {
    let mut queued: libc::c_int = 0;
    // SAFETY: the pointer is to a live integer, which this request fills.
    let failed = unsafe { libc::ioctl(device.as_raw_fd(), libc::TIOCOUTQ, &raw mut queued) } != 0;
    if failed {
        return None;
    }
    usize::try_from(queued).ok()
}
