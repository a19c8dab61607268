//! Errors in Node's form: the cause as text, the negative errno, and its name as the code.

use std::io;

use d2tp_sockets::ConnectionFault;
use napi::bindgen_prelude::{JsObjectValue, JsValue, ToNapiValue, Unknown};
use napi::{Env, Status, sys};
use nix::errno::Errno;

/// Why a call failed.
#[derive(Debug)]
pub struct CallFault {
    errno: Errno,
    words: String,
}

impl CallFault {
    pub fn new(errno: Errno, words: impl Into<String>) -> CallFault {
        let words = words.into();
        CallFault { errno, words }
    }

    /// The error that JavaScript catches.
    pub fn thrown(self, env: &Env) -> napi::Error {
        // SAFETY: this is the thread of this environment.
        match unsafe { CallFault::to_napi_value(env.raw(), self) } {
            // SAFETY: the value was just created there.
            Ok(value) => unsafe { Unknown::from_raw_unchecked(env.raw(), value) }.into(),
            Err(error) => error,
        }
    }
}

impl From<io::Error> for CallFault {
    fn from(error: io::Error) -> CallFault {
        let known = error
            .get_ref()
            .and_then(|known| known.downcast_ref::<ConnectionFault>());
        if let Some(known) = known {
            return CallFault::new(Errno::from_raw(known.errno), known.words.clone());
        }
        match error.raw_os_error().map(Errno::from_raw) {
            Some(errno) => CallFault::new(errno, errno.desc()),
            // An invalid address has no error number of the kernel.
            None => CallFault::new(Errno::EINVAL, error.to_string()),
        }
    }
}

impl ToNapiValue for CallFault {
    unsafe fn to_napi_value(env: sys::napi_env, fault: CallFault) -> napi::Result<sys::napi_value> {
        let env = Env::from_raw(env);
        let error = napi::Error::new(Status::GenericFailure, &fault.words);
        let mut error = env.create_error(error)?;
        error.set_named_property("code", format!("{:?}", fault.errno))?;
        error.set_named_property("errno", -(fault.errno as i32))?;
        Ok(error.raw())
    }
}

/// A result whose fault is thrown in JavaScript.
pub trait ThrowFault<T> {
    fn failed(self, env: &Env) -> napi::Result<T>;
}

impl<T> ThrowFault<T> for Result<T, CallFault> {
    fn failed(self, env: &Env) -> napi::Result<T> {
        self.map_err(|fault| fault.thrown(env))
    }
}
