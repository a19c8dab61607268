-- mpv says how playing ended, and at what time of the film, into the file that OUT names.
local at = 0
mp.observe_property("time-pos", "number", function(_, seconds) at = seconds or at end)
mp.register_event("end-file", function(event)
    local out = io.open(os.getenv("OUT"), "w")
    out:write(event.reason, " ", at, "\n")
    out:close()
end)
