// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/nvmlsim/librarytest"
	"stowage.dev/stowage/test/gpu/cuda"
)

// clientEnv makes the test's program a CUDA program, one that does as it is told: see serve.
const clientEnv = "STOWAGE_GPU_CLIENT"

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == sharing.HelperCommand {
		fmt.Fprintln(os.Stderr, sharing.Become(os.Stdin))
		os.Exit(1)
	}
	if os.Getenv(clientEnv) == "" {
		os.Exit(librarytest.Main(m))
	}
	if err := serve(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// serve does what the lines of in say, and answers each with a line that begins with "ok" or "failed". It ends with them.
func serve(in io.Reader, out io.Writer) error {
	runtime.LockOSThread() // CUDA's context is the thread's
	var gpu *cuda.GPU
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		answer, err := do(lines.Text(), &gpu)
		if err != nil {
			_, err = fmt.Fprintln(out, "failed", strings.ReplaceAll(err.Error(), "\n", " "))
		} else {
			_, err = fmt.Fprintln(out, "ok", answer)
		}
		if err != nil {
			return err
		}
	}
	return lines.Err()
}

func do(line string, gpu **cuda.GPU) (answer string, err error) {
	command, argument, _ := strings.Cut(line, " ")
	if *gpu == nil && command != "open" && command != "node" {
		return "", errors.New("nothing is open")
	}
	switch command {
	case "open": // loads CUDA, and answers with the GPU's UUID
		if *gpu, err = cuda.Open(); err != nil {
			return "", err
		}
		return (*gpu).UUID, nil
	case "processors": // answers with the number of multiprocessors that it may use
		return fmt.Sprint((*gpu).Processors), nil
	case "compute":
		return "", (*gpu).Compute()
	case "fault":
		return "", (*gpu).Fault()
	case "alloc": // MiB
		var mib uint64
		if _, err := fmt.Sscan(argument, &mib); err != nil {
			return "", err
		}
		_, err := (*gpu).Alloc(mib << 20)
		return "", err
	case "memory": // answers with what is free, and with all of it, in MiB
		free, total, err := (*gpu).Memory()
		return fmt.Sprint(free>>20, " ", total>>20), err
	case "node": // makes a device node of these numbers and opens it
		var major, minor uint32
		if _, err := fmt.Sscan(argument, &major, &minor); err != nil {
			return "", err
		}
		path := fmt.Sprintf("/dev/made-%d-%d", major, minor)
		if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(major, minor))); err != nil {
			return "", fmt.Errorf("mknod: %w", err)
		}
		f, err := os.Open(path)
		if err != nil {
			return "", err
		}
		return "", f.Close()
	default:
		return "", fmt.Errorf("%q is no command", line)
	}
}

const (
	// patience is how long a client has for an answer. On an H100 all checks together take 25 s.
	patience = time.Minute
	// grace is how long a client has to end itself. Then it is killed.
	grace = 5 * time.Second
)

// client is a CUDA program that runs.
type client struct {
	t      *testing.T
	name   string
	cmd    *exec.Cmd
	cancel context.CancelFunc
	in     io.WriteCloser
	pipe   *os.File
	out    *bufio.Scanner // of pipe
	err    *strings.Builder
}

// startClient starts a program, which has to be the test's, or to start it. When the test ends it is told to end, and killed after grace.
func startClient(t *testing.T, name string, env []string, program ...string) *client {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cmd := exec.CommandContext(ctx, program[0], program[1:]...)
	cmd.Env = env
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c := &client{t: t, name: name, cmd: cmd, cancel: cancel, in: in, err: &strings.Builder{}}
	c.pipe, c.out = out.(*os.File), bufio.NewScanner(out)
	cmd.Stderr = c.err
	cmd.Cancel, cmd.WaitDelay = in.Close, grace
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.end)
	return c
}

// localClient runs on the machine itself. It is nobody's client under MPS: a fault would end the others.
func localClient(t *testing.T, name string) *client {
	t.Helper()
	env := append(os.Environ(), clientEnv+"=1", "CUDA_MPS_PIPE_DIRECTORY="+t.TempDir())
	return startClient(t, name, env, "/proc/self/exe")
}

// ask gives the client a command, and returns its answer or how it failed. No answer within patience ends the test.
func (c *client) ask(command string) (string, error) {
	c.t.Helper()
	began := time.Now()
	_, err := fmt.Fprintln(c.in, command)
	if err == nil {
		err = c.pipe.SetReadDeadline(began.Add(patience))
	}
	if err == nil && !c.out.Scan() {
		err = cmp.Or(c.out.Err(), io.EOF)
	}
	if err != nil {
		c.end()
		c.t.Fatalf("%s: %s: no answer: %v; it ended with %v\n%s", c.name, command, err, c.cmd.ProcessState, c.err)
	}
	c.t.Logf("%s: %s: %s (%d ms)", c.name, command, c.out.Text(), time.Since(began).Milliseconds())
	answer, ok := strings.CutPrefix(c.out.Text(), "ok")
	if !ok {
		return "", errors.New(c.out.Text())
	}
	return strings.TrimSpace(answer), nil
}

// must is ask for what has to work.
func (c *client) must(command string) string {
	c.t.Helper()
	answer, err := c.ask(command)
	if err != nil {
		c.t.Errorf("%s: %s: %v", c.name, command, err)
	}
	return answer
}

// kill ends it as the kubelet does with what does not end itself.
func (c *client) kill() {
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

// end tells it to end, and waits for that.
func (c *client) end() {
	c.cancel()
	_ = c.cmd.Wait()
}

// sweep runs a shell's command when the test ends, after the Cleanups that come later, or when the test's process ends without Cleanups, by
// a panic or a signal.
func sweep(t *testing.T, command string, args ...string) {
	t.Helper()
	cmd := exec.Command("sh", append([]string{"-c", "read end; " + command, "sweep"}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a terminal's interrupt is for the test
	var said bytes.Buffer
	cmd.Stderr = &said
	in, err := cmd.StdinPipe() // ends with this process
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("%s %q: %v: %s", command, args, err, &said)
		}
	})
}

// libc is the folder of the C library that this process uses, and its loader.
func libc(t *testing.T) (folder, loader string) {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		fields := strings.Fields(line)
		if len(fields) < 6 {
			continue
		}
		switch base := filepath.Base(fields[5]); {
		case base == "libc.so.6":
			folder = filepath.Dir(fields[5])
		case strings.HasPrefix(base, "ld-linux"):
			loader = fields[5]
		}
	}
	if folder == "" || loader == "" {
		t.Fatalf("no C library among the files of this process:\n%s", maps)
	}
	return folder, loader
}
