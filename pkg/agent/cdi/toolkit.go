// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	toolkit "github.com/NVIDIA/nvidia-container-toolkit/api/config/v1"
	"github.com/pelletier/go-toml"
	"golang.org/x/sys/unix"
)

const (
	// AutoToolkitConfig stands for the configuration of each toolkit that is where toolkits are on a host.
	AutoToolkitConfig = "auto"
	// acceptEnvironment is true where the file does not say otherwise.
	acceptEnvironment = "accept-nvidia-visible-devices-envvar-when-unprivileged"
	// maxToolkitConfig is in bytes. The file that the toolkit itself writes has less than 2,000.
	maxToolkitConfig = 256 << 10
)

// toolkits are where NVIDIA's container toolkit may be on a host. The GPU operator's comes first: it makes its own the container runtime's.
var toolkits = []struct{ runtime, config string }{
	{"/usr/local/nvidia/toolkit/nvidia-container-runtime", "/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml"},
	{"/usr/bin/nvidia-container-runtime", "/etc/nvidia-container-runtime/config.toml"}, // a package of the distribution
}

// GPUsByEnvironment says why containers may get GPUs without a claim: NVIDIA's container runtime gives those that the variable
// NVIDIA_VISIBLE_DEVICES names, in a pod's environment or its image's, unless its configuration, a file on the host, says otherwise. It is
// empty if that is said or, with AutoToolkitConfig, if there is no runtime.
func GPUsByEnvironment(hostRoot, file string) string {
	h := host(hostRoot)
	if file != AutoToolkitConfig {
		return h.gpusByEnvironment(file, "")
	}
	var warnings []string
	for _, t := range toolkits {
		if warning := h.gpusByEnvironment(t.config, t.runtime); warning != "" {
			warnings = append(warnings, warning)
		}
	}
	return strings.Join(warnings, "; ")
}

// gpusByEnvironment is of one file. It may be missing if it is the default of a runtime: its defaults hold, if that is there.
func (h host) gpusByEnvironment(file, runtime string) string {
	data, err := h.read(file, maxToolkitConfig)
	if errors.Is(err, unix.ENOENT) && runtime != "" {
		if _, err := h.stat(runtime, true); err != nil {
			return ""
		}
		data, err = nil, nil
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
		return fmt.Sprintf("whether NVIDIA_VISIBLE_DEVICES in a pod's environment gives it GPUs is not known, the host's %s cannot be read: %v",
			file, err)
	case config.AcceptEnvvarUnprivileged:
		return fmt.Sprintf("NVIDIA_VISIBLE_DEVICES in a pod's environment gives it GPUs without a claim where NVIDIA's container runtime "+
			"starts it: set %s = false in the host's %s",
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
	fd, err := unix.Openat2(root, path,
		&unix.OpenHow{Flags: unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT})
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
