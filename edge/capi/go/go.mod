module github.com/cedos/cedos/edge/capi/go

go 1.21
