// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// Of two GPUs, as nvidia-persistenced has their addresses.
const (
	firstGPU  = "0000:1b:00.0"
	secondGPU = "0001:3b:02.0"
)

// asked is a daemon that answers each call with the words that reply returns for those of the request.
type asked struct {
	mu       sync.Mutex
	requests [][]uint32
	reply    func(request []uint32) []byte
}

// listen is the daemon at the socket below a root, until the test ends.
func (a *asked) listen(t *testing.T, root, run string) (socket string) {
	t.Helper()
	socket = filepath.Join(root, run, "nvidia-persistenced/socket")
	if err := os.MkdirAll(filepath.Dir(socket), 0o700); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var served sync.WaitGroup
	t.Cleanup(func() {
		listener.Close()
		served.Wait()
	})
	served.Go(func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			served.Go(func() {
				defer connection.Close()
				words, err := readRecord(connection)
				if err != nil {
					return
				}
				a.mu.Lock()
				a.requests = append(a.requests, words)
				a.mu.Unlock()
				if answer := a.reply(words); answer != nil {
					_, _ = connection.Write(answer)
				} else {
					_, _ = io.Copy(io.Discard, connection) // until the other end has enough
				}
			})
		}
	})
	return socket
}

// record is one that is a single fragment.
func record(words ...uint32) []byte {
	data := binary.BigEndian.AppendUint32(nil, lastFragment|uint32(4*len(words)))
	for _, word := range words {
		data = binary.BigEndian.AppendUint32(data, word)
	}
	return data
}

// success is what nvidia-persistenced 595.71.05 answers: the same call, a reply, accepted, no verifier, done, and results.
func success(results ...uint32) []byte {
	return record(append([]uint32{1, 1, 0, 0, 0, 0}, results...)...)
}

func always(data []byte) func([]uint32) []byte { return func([]uint32) []byte { return data } }

// TestPersistencedIsAskedForEachGPU: the requests are those that nvidia-persistenced 595.71.05 has taken from this program.
func TestPersistencedIsAskedForEachGPU(t *testing.T) {
	kept := map[uint32]uint32{0x1b: 1, 0x3b: 0} // by bus
	daemon := &asked{reply: func(request []uint32) []byte {
		bus := request[11]
		if request[5] == getPersistenceMode {
			return success(0, kept[bus])
		}
		kept[bus] = request[14]
		return success(0)
	}}
	root := t.TempDir()
	daemon.listen(t, root, "run")
	p := NewDriver(DriverOptions{DriverRoot: filepath.Join(root, "driver"), HostRoot: root}).Persistenced
	check := func(address string, want bool) {
		t.Helper()
		keeps, pid, err := p.Keeps(t.Context(), address)
		if keeps != want || err != nil || keeps && pid != uint32(os.Getpid()) {
			t.Errorf("%s is kept: %t, by process %d, %v; want %t, by this one", address, keeps, pid, err, want)
		}
	}
	check(firstGPU, true)
	check(secondGPU, false)
	if err := errors.Join(p.Keep(t.Context(), firstGPU, false), p.Keep(t.Context(), secondGPU, true)); err != nil {
		t.Error(err)
	}
	check(firstGPU, false)
	check(secondGPU, true)
	head := func(procedure uint32, arguments ...uint32) []uint32 {
		return append([]uint32{1, 0, 2, 35006, 1, procedure, 0, 0, 0, 0}, arguments...)
	}
	want := [][]uint32{
		head(2, 0, 0x1b, 0, 0), head(2, 1, 0x3b, 2, 0), head(1, 0, 0x1b, 0, 0, 0), head(1, 1, 0x3b, 2, 0, 1), head(2, 0, 0x1b, 0, 0), head(2, 1, 0x3b, 2, 0),
	}
	if diff := cmp.Diff(want, daemon.requests); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
}

// TestTheSocketIsTheDriversFirst: a driver container has a daemon of its own, and what is left of one is none.
func TestTheSocketIsTheDriversFirst(t *testing.T) {
	for _, places := range [][]string{{"driver/run"}, {"driver/var/run"}, {"run"}, {"var/run"}, {"driver/run", "run"}} {
		root := t.TempDir()
		(&asked{reply: always(success(0, 1))}).listen(t, root, places[0])
		if len(places) > 1 {
			(&asked{reply: always(success(0, 0))}).listen(t, root, places[1])
		}
		p := newPersistenced(DriverOptions{DriverRoot: filepath.Join(root, "driver"), HostRoot: root})
		if keeps, _, err := p.Keeps(t.Context(), firstGPU); !keeps || err != nil {
			t.Errorf("sockets %v: %t, %v", places, keeps, err)
		}
	}
	root := t.TempDir()
	stale := (&asked{}).listen(t, root, "other")
	if err := os.MkdirAll(filepath.Join(root, "run/nvidia-persistenced"), 0o700); err != nil {
		t.Fatal(err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(root, "run/nvidia-persistenced/socket")})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false) // as of a daemon that was killed
	listener.Close()
	for name, dir := range map[string]string{"left": root, "none": t.TempDir(), "a file instead of a folder": filepath.Dir(stale)} {
		p := newPersistenced(DriverOptions{DriverRoot: dir, HostRoot: dir})
		if keeps, _, err := p.Keeps(t.Context(), firstGPU); keeps || err != nil {
			t.Errorf("%s: %t, %v", name, keeps, err)
		}
		if err := p.Keep(t.Context(), firstGPU, false); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := p.Keep(t.Context(), firstGPU, true); !errors.Is(err, ErrNoPersistenced) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestWhatPersistencedAnswers: what it refuses is told, and what is no answer is none.
func TestWhatPersistencedAnswers(t *testing.T) {
	const none = "its answer is none of Sun RPC"
	tests := map[string]struct {
		answer []byte
		want   string // in the error; empty for success
		keeps  bool
	}{
		"in fragments":                {answer: slices.Concat([]byte{0, 0, 0, 8}, success()[4:12], []byte{0x80, 0, 0, 24}, success(0, 1)[12:]), keeps: true},
		"with a verifier":             {answer: record(1, 1, 0, 1, 5, 7, 7, 0, 0, 1), keeps: true},
		"the driver failed":           {answer: success(3), want: "it refuses with status 3: the driver failed it"},
		"memory stays with the host":  {answer: success(10), want: "status 10: the GPU's memory"},
		"a status of a later daemon":  {answer: success(77), want: "it refuses with status 77"},
		"another program":             {answer: record(1, 1, 0, 0, 0, 1), want: "it does not do the call (1)"},
		"no right to":                 {answer: record(1, 1, 1, 1, 5), want: "it rejects the call (1)"},
		"the answer of another call":  {answer: record(2, 1, 0, 0, 0, 0, 0, 1), want: none},
		"a call":                      {answer: record(1, 0, 2, 35006, 1, 2), want: none},
		"no result":                   {answer: success(), want: none},
		"half an answer":              {answer: record(1, 1, 0), want: none},
		"a verifier beyond all":       {answer: record(1, 1, 0, 0, 0xffffffff, 0, 0, 1), want: none},
		"a verifier beyond its words": {answer: record(1, 1, 0, 0, 4, 0), want: none},
		"more than it can be":         {answer: []byte{0xff, 0xff, 0xff, 0xff}, want: none},
		"more in fragments":           {answer: bytes.Repeat(append([]byte{0, 0, 0, 4}, 0, 0, 0, 1), 2000), want: none},
		"fragments for ever":          {answer: make([]byte, 64), want: none},
		"it ends":                     {answer: []byte{}, want: "EOF"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			(&asked{reply: always(tc.answer)}).listen(t, root, "run")
			p := newPersistenced(DriverOptions{DriverRoot: root, HostRoot: root})
			keeps, _, err := p.Keeps(t.Context(), secondGPU)
			if keeps != tc.keeps || (err == nil) != (tc.want == "") {
				t.Errorf("%t, %v; want %t, error %q", keeps, err, tc.keeps, tc.want)
			}
			if tc.want == "" {
				return
			}
			for what, err := range map[string]error{"asked": err, "to let go": p.Keep(t.Context(), secondGPU, false), "to keep": p.Keep(t.Context(), secondGPU, true)} {
				if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), secondGPU) || !strings.Contains(err.Error(), "nvidia-persistenced") {
					t.Errorf("%s: %v; want %q, with the GPU and the daemon named", what, err, tc.want)
				}
			}
		})
	}
}

// TestSuccessWithoutAModeTellsNothing of a GPU, whereas to be told to keep one it needs no more.
func TestSuccessWithoutAModeTellsNothing(t *testing.T) {
	root := t.TempDir()
	(&asked{reply: always(success(0))}).listen(t, root, "run")
	p := newPersistenced(DriverOptions{DriverRoot: root, HostRoot: root})
	if keeps, _, err := p.Keeps(t.Context(), firstGPU); keeps || !errors.Is(err, errNoReply) {
		t.Errorf("kept %t, %v", keeps, err)
	}
	if err := p.Keep(t.Context(), firstGPU, true); err != nil {
		t.Errorf("to keep: %v", err)
	}
}

// TestAGPUThatPersistencedDoesNotKnowIsKeptByNobody: it knows those that were there when it was started.
func TestAGPUThatPersistencedDoesNotKnowIsKeptByNobody(t *testing.T) {
	root := t.TempDir()
	(&asked{reply: always(success(2))}).listen(t, root, "run")
	p := newPersistenced(DriverOptions{DriverRoot: root, HostRoot: root})
	for _, gpu := range []string{firstGPU, secondGPU} {
		keeps, _, err := p.Keeps(t.Context(), gpu)
		if let := p.Keep(t.Context(), gpu, false); keeps || err != nil || let != nil {
			t.Errorf("%s: kept %t, %v; let go: %v", gpu, keeps, err, let)
		}
		if err := p.Keep(t.Context(), gpu, true); err == nil || errors.Is(err, ErrNoPersistenced) || !strings.Contains(err.Error(), "it does not know the GPU") {
			t.Errorf("%s, to keep: %v", gpu, err)
		}
	}
}

// TestPersistencedIsNotWaitedForForEver: a daemon waits for the driver, which may hang.
func TestPersistencedIsNotWaitedForForEver(t *testing.T) {
	root := t.TempDir()
	(&asked{reply: always(nil)}).listen(t, root, "run")
	p := newPersistenced(DriverOptions{DriverRoot: root, HostRoot: root})
	reason := errors.New("long enough")
	for _, gpu := range []string{firstGPU, secondGPU} {
		ctx, cancel := context.WithTimeoutCause(t.Context(), 50*time.Millisecond, reason)
		defer cancel()
		if err := p.Keep(ctx, gpu, false); !errors.Is(err, reason) || !strings.Contains(fmt.Sprint(err), "does not answer") {
			t.Errorf("%s: %v", gpu, err)
		}
	}
	if _, _, err := p.Keeps(t.Context(), "1b:00"); err == nil || !strings.Contains(err.Error(), `PCI address "1b:00"`) {
		t.Errorf("no address: %v", err)
	}
}
