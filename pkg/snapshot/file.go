// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync"

	jsonv2 "github.com/go-json-experiment/json"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	utiljson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

const (
	// MaxBytes bounds a file, unpacked: 5,000 nodes of 8 GPUs with a pod on each GPU are some 200 MiB.
	MaxBytes = 2 << 30
	// MaxYAMLBytes bounds one in YAML, which takes a hundred times its size to read.
	MaxYAMLBytes = 64 << 20
	// MaxObjects bounds the objects of one kind. Kubernetes is made for 150,000 pods.
	MaxObjects = 500_000
)

// Read reads a file: JSON or YAML, plain or packed by gzip. The error names the object and the field that are wrong.
func Read(r io.Reader) (*Snapshot, error) {
	unpacked, err := unpack(r)
	if err != nil {
		return nil, err
	}
	bounded := &io.LimitedReader{R: unpacked, N: MaxBytes + 1}
	file := &text{from: bounded}
	first, err := file.next()
	if errors.Is(err, errTruncated) {
		return nil, errors.New("it is empty")
	} else if err == nil && first != '{' {
		file, err = fromYAML(io.MultiReader(bytes.NewReader(file.block), bounded))
	}
	if err != nil {
		return nil, err
	}
	s, err := decode(file)
	if bounded.N == 0 {
		return nil, fmt.Errorf("it has more than %d bytes", MaxBytes)
	}
	return s, err
}

// unpack unpacks what is packed.
func unpack(r io.Reader) (io.Reader, error) {
	buffered := bufio.NewReader(r)
	if magic, err := buffered.Peek(2); err != nil || magic[0] != 0x1f || magic[1] != 0x8b {
		return buffered, nil
	}
	unpacked, err := gzip.NewReader(buffered)
	if err != nil {
		return nil, fmt.Errorf("unpack: %w", err)
	}
	return unpacked, nil
}

// fromYAML reads YAML as JSON.
func fromYAML(r io.Reader) (*text, error) {
	content, err := io.ReadAll(io.LimitReader(r, MaxYAMLBytes+1))
	switch {
	case err != nil:
		return nil, err
	case len(content) > MaxYAMLBytes:
		return nil, fmt.Errorf("it is YAML of more than %d bytes: use JSON", MaxYAMLBytes)
	}
	if content, err = yaml.YAMLToJSON(content); err != nil {
		return nil, fmt.Errorf("neither JSON nor YAML: %w", err)
	}
	return &text{from: bytes.NewReader(content)}, nil
}

func decode(file *text) (*Snapshot, error) {
	objects := decoding{options: sync.Pool{New: func() any { return remembering() }}}
	objects.group.SetLimit(1 + runtime.GOMAXPROCS(0))
	parts, err := file.members(func(name string) bool { return kindNamed(name) >= 0 }, objects.start)
	_ = objects.group.Wait() // errors are told in the order of the kinds
	switch {
	case file.failed != nil:
		return nil, file.failed
	case errors.Is(err, errTooMany):
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("not an object in JSON: %w", err)
	}
	fields := parts.fields
	installation := fields["installation"]
	delete(fields, "installation")
	head, err := json.Marshal(fields)
	if err != nil {
		return nil, err
	}
	s := &Snapshot{}
	switch strict, err := utiljson.UnmarshalStrict(head, s); {
	case err != nil:
		return nil, err
	case s.APIVersion != APIVersion || s.Kind != Kind:
		return nil, fmt.Errorf("apiVersion %q, kind %q: want %s, %s", s.APIVersion, s.Kind, APIVersion, Kind)
	case parts.notList != nil:
		return nil, parts.notList
	case len(strict) > 0:
		return nil, errors.Join(strict...)
	}
	if installation != nil { // its objects may have fields of a newer API
		if err := utiljson.UnmarshalCaseSensitivePreserveInts(installation, &s.Installation); err != nil {
			return nil, fmt.Errorf("installation: %w", err)
		}
		if err := s.Installation.check(); err != nil {
			return nil, fmt.Errorf("installation: %w", err)
		}
	}
	if err := objects.put(&s.Objects); err != nil {
		return nil, err
	}
	return s, s.check()
}

// decoding decodes objects on all processors, while the file is still being divided: a large cluster has some hundred megabytes of them.
type decoding struct {
	group   errgroup.Group
	options sync.Pool // of jsonv2.Options
	parts   [][]*decoded
}

// decoded are objects that follow one another in a list.
type decoded struct {
	put func(*Objects)
	err error
}

func (d *decoding) start(field string, first int, raw []json.RawMessage, done func()) {
	k, part := kindNamed(field), &decoded{}
	if d.parts == nil {
		d.parts = make([][]*decoded, len(kinds))
	}
	d.parts[k] = append(d.parts[k], part)
	d.group.Go(func() error {
		options := d.options.Get().(jsonv2.Options)
		defer d.options.Put(options)
		defer done()
		part.put, part.err = kinds[k].decode(options, first, raw)
		return nil
	})
}

// put puts the objects into their lists, once all are decoded. The error is the first, in the order of the kinds and of their lists.
func (d *decoding) put(o *Objects) error {
	for _, parts := range d.parts {
		for _, part := range parts {
			if part.err != nil {
				return part.err
			}
			part.put(o)
		}
	}
	return nil
}

func kindNamed(field string) int {
	return slices.IndexFunc(kinds, func(k kind) bool { return k.field == field })
}

// check sorts the lists, and refuses what an API server cannot have: two objects of one name or UID,
// and pods, claims or groups without a UID.
func (s *Snapshot) check() error {
	faults := make([]error, len(kinds))
	var group errgroup.Group
	for i, k := range kinds {
		group.Go(func() error {
			k.sort(&s.Objects)
			faults[i] = k.check(&s.Objects)
			return nil
		})
	}
	_ = group.Wait()
	if i := slices.IndexFunc(faults, func(err error) bool { return err != nil }); i >= 0 {
		return faults[i]
	}
	return nil
}

// check looks at a list that is sorted.
func (k *kind) check(o *Objects) error {
	objects := k.names(o)
	uids := make(map[types.UID]int, len(objects))
	for i, object := range objects {
		if i > 0 && object.GetName() == objects[i-1].GetName() && object.GetNamespace() == objects[i-1].GetNamespace() {
			return fmt.Errorf("%s %s: there are two of that name", k.field, Reference(object))
		}
		uid := object.GetUID()
		if uid == "" {
			if k.field == "pods" || k.field == "resourceClaims" {
				return fmt.Errorf("%s %s: metadata.uid: Required value", k.field, Reference(object))
			}
			continue
		}
		if other, known := uids[uid]; known {
			return fmt.Errorf("%s %s: metadata.uid: Duplicate value: %q is that of %s, too", k.field, Reference(object), uid,
				Reference(objects[other]))
		}
		uids[uid] = i
	}
	return nil
}

// Write writes a snapshot as JSON, an object a line. Equal snapshots are equal bytes.
func (s *Snapshot) Write(w io.Writer) error {
	out := bufio.NewWriterSize(w, 1<<20)
	head := *s
	head.Objects = Objects{}
	first, err := json.Marshal(&head)
	if err != nil {
		return err
	}
	_, _ = out.Write(bytes.TrimSuffix(first, []byte("}")))
	for _, k := range kinds {
		objects := k.names(&s.Objects)
		if len(objects) == 0 {
			continue
		}
		fmt.Fprintf(out, ",\n%q:[", k.field)
		for i, object := range objects {
			line, err := json.Marshal(object)
			if err != nil {
				return fmt.Errorf("%s %s: %w", k.field, Reference(object), err)
			}
			if i > 0 {
				_ = out.WriteByte(',')
			}
			_ = out.WriteByte('\n')
			_, _ = out.Write(line)
		}
		_, _ = out.WriteString("]")
	}
	_, _ = out.WriteString("}\n")
	return out.Flush() // and tells of the first write that failed
}
