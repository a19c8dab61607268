//! D2Prox: the caching proxy between D2TP devices and the web of today.
