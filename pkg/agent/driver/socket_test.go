package driver

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
)

// TestWhoHasTakenASocket is in the error, for the log, and not in its text: the Node would be written each time the process is started anew.
func TestWhoHasTakenASocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.sock")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	_, err = listenOn(path)
	var taken *socketError
	if !errors.As(err, &taken) || int(taken.PID) != os.Getpid() || taken.Err != nil {
		t.Fatalf("%#v, want PID %d", err, os.Getpid())
	}
	if want := "the socket " + path + " is served by another process, not by this agent"; err.Error() != want {
		t.Errorf("%q, want %q", err, want)
	}
}
