package cdi

import (
	"errors"
	"fmt"
	"io"
	"os"

	toolkit "github.com/NVIDIA/nvidia-container-toolkit/api/config/v1"
	"github.com/pelletier/go-toml"
	"golang.org/x/sys/unix"
)

const (
	// ToolkitConfig is where NVIDIA's container runtime has its configuration on the host.
	ToolkitConfig = "/etc/nvidia-container-runtime/config.toml"
	// toolkitRuntime is there where the toolkit is a package of the distribution.
	toolkitRuntime = "/usr/bin/nvidia-container-runtime"
	// acceptEnvironment is true where the file does not say otherwise.
	acceptEnvironment = "accept-nvidia-visible-devices-envvar-when-unprivileged"
	// maxToolkitConfig is in bytes. The file that the toolkit itself writes has less than 2,000.
	maxToolkitConfig = 256 << 10
)

// GPUsByEnvironment says why containers may get GPUs without a claim: NVIDIA's container runtime gives those that the variable
// NVIDIA_VISIBLE_DEVICES names, in a pod's environment or its image's, unless its configuration, a file on the host, says otherwise. It is empty if
// that is said, or if neither the file is there nor the runtime.
func GPUsByEnvironment(hostRoot, file string) string {
	h := host(hostRoot)
	data, err := h.read(file, maxToolkitConfig)
	if errors.Is(err, unix.ENOENT) && file == ToolkitConfig { // a path that somebody has given should be there
		if _, err := h.stat(toolkitRuntime, true); err != nil {
			return ""
		}
		data, err = nil, nil // its defaults hold
	}
	var config *toolkit.Config
	if err == nil {
		config, err = toolkit.GetDefault()
	}
	if err == nil {
		err = toml.Unmarshal(data, config)
	}
	switch {
	case err != nil:
		return fmt.Sprintf("whether NVIDIA_VISIBLE_DEVICES in a pod's environment gives it GPUs is not known, the host's %s cannot be read: %v", file, err)
	case config.AcceptEnvvarUnprivileged:
		return fmt.Sprintf("NVIDIA_VISIBLE_DEVICES in a pod's environment gives it GPUs without a claim where NVIDIA's container runtime starts it: set %s = false in the host's %s",
			acceptEnvironment, file)
	}
	return ""
}

// read returns a file's content. What is no file, or has more than so many bytes, is an error.
func (h host) read(path string, most int64) ([]byte, error) {
	root, err := unix.Open(string(h), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("the host's root folder %s: %w", h, err)
	}
	defer unix.Close(root)
	// A pipe must not be waited for.
	fd, err := unix.Openat2(root, path, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT})
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), path)
	defer file.Close()
	if info, err := file.Stat(); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() {
		return nil, errors.New("it is no file")
	}
	data, err := io.ReadAll(io.LimitReader(file, most+1))
	if err == nil && int64(len(data)) > most {
		err = fmt.Errorf("it has more than %d bytes", most)
	}
	return data, err
}
