package sharing

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
)

// processes are the host's, seen through /proc.
type processes struct{ proc string }

// podCgroup finds the pod's UID in a cgroup path, as the kubelet's systemd and cgroupfs drivers write it:
// …/kubepods-burstable-pod<uid with underscores>.slice/… and …/kubepods/burstable/pod<uid>/….
var podCgroup = regexp.MustCompile(`kubepods[^:\n]*[-/]pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(\.slice)?(/|$)`)

// PodOf implements Processes.
func (p *processes) PodOf(pid uint32) (types.UID, error) {
	data, err := os.ReadFile(filepath.Join(p.proc, strconv.FormatUint(uint64(pid), 10), "cgroup"))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return "", fmt.Errorf("process %d: %w", pid, ErrNoProcess)
	}
	if err != nil {
		return "", fmt.Errorf("process %d: %w", pid, err)
	}
	for line := range strings.Lines(string(data)) {
		if found := podCgroup.FindStringSubmatch(strings.TrimSpace(line)); found != nil {
			return types.UID(strings.ReplaceAll(found[1], "_", "-")), nil
		}
	}
	return "", nil
}

// End implements Processes. The process is held by a file descriptor while its pod is looked up, so that no other
// process that gets its ID is hit.
func (p *processes) End(pid uint32, pod types.UID) error {
	fd, err := unix.PidfdOpen(int(pid), 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	of, err := p.PodOf(pid)
	if errors.Is(err, ErrNoProcess) {
		return nil
	}
	if err != nil {
		return err
	}
	if of != pod {
		return fmt.Errorf("process %d is of pod %q, not of pod %s", pid, of, pod)
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d of pod %s: %w", pid, pod, err)
	}
	return nil
}
