// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// serve has the machine's socket served until the test or stop ends it, and
// returns when it answers.
func serve(t *testing.T, m *Machine) (socket string, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- m.ServeControl(ctx) }()
	stopped := false
	stop = func() {
		cancel()
		if !stopped {
			if err := <-ended; err != nil {
				t.Errorf("serve: %v", err)
			}
		}
		stopped = true
	}
	t.Cleanup(stop)
	return filepath.Join(m.file.folder, ControlSocket), stop
}

// eventually sends a command until somebody serves.
func eventually(t *testing.T, socket string, c Command) Result {
	t.Helper()
	for {
		result, err := Control(t.Context(), socket, c)
		var network *net.OpError
		if errors.As(err, &network) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		return result
	}
}

func TestTheControlSocketTakesCommands(t *testing.T) {
	m := openMachine(t, "dgx-h100", private(t))
	socket, _ := serve(t, m)
	eventually(t, socket, &SetMIG{GPU: "0", Enabled: true})
	made, err := Control(t.Context(), socket, &CreateMIG{GPU: "0", Profile: "1g.10gb"})
	if err != nil || made.MIG == nil || !strings.HasPrefix(made.MIG.UUID, "MIG-") {
		t.Fatalf("%+v, %v", made, err)
	}
	shown, err := Control(t.Context(), socket, &ShowState{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(m.State(), shown.State); diff != "" {
		t.Errorf("state (-want +got):\n%s", diff)
	}
	if _, err := Control(t.Context(), socket, &RaiseXID{GPU: "9", Code: 1}); err == nil || !strings.Contains(err.Error(), `gpu: "9"`) {
		t.Errorf("error %v, want the machine's own", err)
	}
	info, err := os.Stat(socket)
	if err != nil || info.Mode().Perm() != 0o600 || info.Mode().Type() != fs.ModeSocket {
		t.Errorf("socket %v, %v", info.Mode(), err)
	}
}

func TestEveryCommandPassesTheSocketAsItIs(t *testing.T) {
	seen := map[string]bool{}
	for _, make := range commands {
		name := make().Name()
		if seen[name] {
			t.Errorf("%q twice", name)
		}
		seen[name] = true
		c, err := decodeCommand(fmt.Appendf(nil, `{"command":%q,"arguments":{}}`, name))
		if err != nil || c.Name() != name {
			t.Errorf("%s: %v, %v", name, c, err)
		}
	}
}

func TestABadLineIsAnsweredAndTheNextOneTaken(t *testing.T) {
	m := openMachine(t, "t4", private(t))
	socket, _ := serve(t, m)
	eventually(t, socket, &ShowState{})
	connection, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	answers := bufio.NewScanner(connection)
	tests := []struct{ line, want string }{
		{`{`, "decode request"},
		{`{"command":"sail"}`, `command: \"sail\": want one of client add, `},
		{`{"command":"xid","argument":{}}`, `unknown field \"argument\"`},
		{`{"command":"xid","arguments":{"gpu":"0","code":1,"colour":2}}`, `unknown field \"colour\"`},
		{`{"command":"xid","arguments":{"gpu":"0","Code":1}}`, `unknown field \"Code\"`},
		{`{"command":"xid","arguments":{"gpu":"0","code":"1"}}`, "code of type uint64"},
		{`{"command":"xid","arguments":{"gpu":"0","gpu":"1","code":1}}`, "duplicate field"},
		{`{"command":"xid","arguments":{"gpu":"0","code":13}}`, `{"result":{}}`},
	}
	for _, test := range tests {
		fmt.Fprintln(connection, test.line)
		if !answers.Scan() {
			t.Fatalf("%s: no answer: %v", test.line, answers.Err())
		}
		if !strings.Contains(answers.Text(), test.want) {
			t.Errorf("%s: %s, want %q", test.line, answers.Text(), test.want)
		}
	}
}

// TestTheNextProcessTakesOver: a socket is served by one process at a time, also
// after one that was killed.
func TestTheNextProcessTakesOver(t *testing.T) {
	folder := private(t)
	if l, err := net.Listen("unix", filepath.Join(folder, ControlSocket)); err != nil {
		t.Fatal(err)
	} else {
		l.(*net.UnixListener).SetUnlinkOnClose(false) // as the kernel leaves it after kill -9
		l.Close()
	}
	one, other := openMachine(t, "t4", folder), openMachine(t, "t4", folder)
	socket, stop := serve(t, one)
	eventually(t, socket, &RaiseXID{GPU: "0", Code: 1})
	serve(t, other)
	eventually(t, socket, &RaiseXID{GPU: "0", Code: 2})
	stop()
	eventually(t, socket, &RaiseXID{GPU: "0", Code: 3})
	if got := other.State().LastEvent; got != 3 {
		t.Errorf("%d events, want 3", got)
	}
}

func TestAMachineInMemoryHasNoSocket(t *testing.T) {
	if err := mustNew(t, "t4").machine.ServeControl(t.Context()); err == nil {
		t.Error("it is served")
	}
}

func TestNobodyServes(t *testing.T) {
	if _, err := Control(t.Context(), filepath.Join(t.TempDir(), "none"), &Reboot{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v, want %v", err, fs.ErrNotExist)
	}
}

// FuzzALineOfTheSocket: whatever is sent, the machine stays one that can be
// used and kept.
func FuzzALineOfTheSocket(f *testing.F) {
	for _, make := range commands {
		f.Add(fmt.Appendf(nil, `{"command":%q,"arguments":{"gpu":"0"}}`, make().Name()))
	}
	f.Add([]byte(`{"command":"mig mode","arguments":{"gpu":"0","enabled":true}}`))
	f.Add([]byte(`{"command":"mig create","arguments":{"gpu":"0","profile":"1g.10gb","start":3}}`))
	f.Add([]byte(`{"command":"proc add","arguments":{"gpu":"0","pid":1,"kind":"compute","memoryMiB":18446744073709551615,"instance":{"gpu":0,"compute":0}}}`))
	p, err := LoadProfile("dgx-h100")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		m := NewMachine(p, "node-a")
		m.obey(line)
		m.Do(&UnhangGPU{GPU: "0"})
		lib := m.NVML()
		if m.State().Driver.Loaded {
			open(t, lib)
		}
		if memory, _ := lib.devices[0].GetMemoryInfo(); memory.Used > memory.Total {
			t.Errorf("%s: memory %+v", line, memory)
		}
	})
}
