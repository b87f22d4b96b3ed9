package snapshot

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"

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
	content, err := readAll(r)
	if err != nil {
		return nil, err
	}
	if trimmed := bytes.TrimLeft(content, " \t\r\n"); len(trimmed) == 0 {
		return nil, errors.New("it is empty")
	} else if trimmed[0] != '{' {
		if len(content) > MaxYAMLBytes {
			return nil, fmt.Errorf("it is YAML of %d bytes, at most %d are read: use JSON", len(content), MaxYAMLBytes)
		}
		if content, err = yaml.YAMLToJSON(content); err != nil {
			return nil, fmt.Errorf("neither JSON nor YAML: %w", err)
		}
	}
	return decode(content)
}

// readAll reads all there is, unpacked, and no more than MaxBytes.
func readAll(r io.Reader) ([]byte, error) {
	var content bytes.Buffer // it grows once, by the size of a file that is not packed
	if file, ok := r.(interface{ Stat() (fs.FileInfo, error) }); ok {
		if info, err := file.Stat(); err == nil && info.Mode().IsRegular() {
			content.Grow(int(min(info.Size(), MaxBytes)) + bytes.MinRead)
		}
	}
	buffered := bufio.NewReader(r)
	var source io.Reader = buffered
	if magic, err := buffered.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
		unpacked, err := gzip.NewReader(buffered)
		if err != nil {
			return nil, fmt.Errorf("unpack: %w", err)
		}
		source = unpacked
	}
	switch n, err := content.ReadFrom(io.LimitReader(source, MaxBytes+1)); {
	case err != nil:
		return nil, err
	case n > MaxBytes:
		return nil, fmt.Errorf("it has more than %d bytes", MaxBytes)
	}
	return content.Bytes(), nil
}

func decode(content []byte) (*Snapshot, error) {
	parts, err := members(content, func(name string) bool {
		return slices.ContainsFunc(kinds, func(k kind) bool { return k.field == name })
	})
	switch {
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
	for _, k := range kinds {
		items, ok := parts.lists[k.field]
		if !ok {
			continue
		}
		if err := k.decode(&s.Objects, items); err != nil {
			return nil, err
		}
		k.sort(&s.Objects)
	}
	return s, s.check()
}

// check refuses what an API server cannot have: two objects of one name or UID, and pods, claims or groups without a UID.
func (s *Snapshot) check() error {
	for _, k := range kinds {
		uids := map[types.UID]string{}
		last := ""
		for i, object := range k.names(&s.Objects) {
			name := Reference(object)
			if i > 0 && name == last {
				return fmt.Errorf("%s %s: there are two of that name", k.field, name)
			}
			last = name
			uid := object.GetUID()
			if uid == "" && (k.field == "pods" || k.field == "resourceClaims") {
				return fmt.Errorf("%s %s: metadata.uid: Required value", k.field, name)
			}
			if other, known := uids[uid]; known && uid != "" {
				return fmt.Errorf("%s %s: metadata.uid: Duplicate value: %q is that of %s, too", k.field, name, uid, other)
			}
			uids[uid] = name
		}
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
