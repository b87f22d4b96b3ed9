// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// References under which a node knows the images. Pods use them with imagePullPolicy: Never.
const (
	// Probe prints what its container sees of the GPUs; its arguments choose the mode, see command probe.
	Probe = "stowage.dev/probe:latest"
	// Sandbox holds a pod's namespaces.
	Sandbox = "stowage.dev/pause:latest"
)

// Platform is the one that the images are for: the machine's own.
const Platform = "linux/" + runtime.GOARCH

const probePackage = "stowage.dev/stowage/internal/localcluster/image/probe"

// Build compiles the probe and writes the archive of both images to dir/images.tar, whose path it returns. Whatever was
// there is replaced.
func Build(ctx context.Context, dir string) (string, error) {
	binary := filepath.Join(dir, "probe")
	if err := Compile(ctx, probePackage, binary); err != nil {
		return "", err
	}
	archive := filepath.Join(dir, "images.tar")
	if err := Pack(binary, archive); err != nil {
		return "", fmt.Errorf("packing the test images: %w", err)
	}
	return archive, nil
}

// Pack writes the archive of both images around the given static binary.
func Pack(binary, archive string) error {
	content, err := os.ReadFile(binary)
	if err != nil {
		return err
	}
	layer, err := layerOf("probe", content)
	if err != nil {
		return err
	}
	images := map[name.Tag]v1.Image{}
	for ref, entrypoint := range map[string][]string{
		Probe:   {"/probe"},
		Sandbox: {"/probe", "pause"},
	} {
		tag, err := name.NewTag(ref)
		if err != nil {
			return err
		}
		if images[tag], err = imageOf(layer, entrypoint); err != nil {
			return fmt.Errorf("image %s: %w", ref, err)
		}
	}
	return tarball.MultiWriteToFile(archive, images)
}

// layerOf is a layer with one executable file in its root folder.
func layerOf(fileName string, content []byte) (v1.Layer, error) {
	var buffer bytes.Buffer
	w := tar.NewWriter(&buffer)
	header := &tar.Header{Typeflag: tar.TypeReg, Name: fileName, Mode: 0o755, Size: int64(len(content))}
	if err := w.WriteHeader(header); err != nil {
		return nil, err
	}
	if _, err := w.Write(content); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(buffer.Bytes())), nil
	})
}

func imageOf(layer v1.Layer, entrypoint []string) (v1.Image, error) {
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Config.Entrypoint = entrypoint
	return mutate.ConfigFile(img, config)
}
