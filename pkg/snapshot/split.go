package snapshot

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
)

// errTruncated is what a file that ends too early has.
var errTruncated = errors.New("it ends too early")

// members divides an object in JSON into its members, without looking into them: they are checked when they are decoded. A large file is so
// read once, where a general decoder goes over it five times.
func members(content []byte) (map[string]json.RawMessage, error) {
	fields := map[string]json.RawMessage{}
	err := divide(content, '{', '}', func(rest []byte) ([]byte, error) {
		end, err := endOf(rest)
		if err != nil {
			return nil, err
		}
		var name string
		if err := json.Unmarshal(rest[:end], &name); err != nil {
			return nil, fmt.Errorf("the name of a field: %w", err)
		}
		rest = bytes.TrimLeft(rest[end:], " \t\r\n")
		if len(rest) == 0 || rest[0] != ':' {
			return nil, fmt.Errorf("%s: no colon follows", name)
		}
		rest = bytes.TrimLeft(rest[1:], " \t\r\n")
		if end, err = endOf(rest); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if _, twice := fields[name]; twice {
			return nil, fmt.Errorf("%s: duplicate field", name)
		}
		fields[name] = rest[:end]
		return rest[end:], nil
	})
	return fields, err
}

// elements divides an array in JSON into its elements, MaxObjects at most.
func elements(content []byte) (all []json.RawMessage, err error) {
	err = divide(content, '[', ']', func(rest []byte) ([]byte, error) {
		end, err := endOf(rest)
		if err != nil {
			return nil, err
		}
		if all = append(all, rest[:end]); len(all) > MaxObjects {
			return nil, fmt.Errorf("more than %d objects", MaxObjects)
		}
		return rest[end:], nil
	})
	return all, err
}

// divide calls part for each part between the brackets; it returns what is left behind the part.
func divide(content []byte, open, shut byte, part func([]byte) ([]byte, error)) error {
	rest := bytes.TrimLeft(content, " \t\r\n")
	if len(rest) == 0 || rest[0] != open {
		return fmt.Errorf("want %q first", string(open))
	}
	rest = bytes.TrimLeft(rest[1:], " \t\r\n")
	for first := true; ; first = false {
		switch {
		case len(rest) == 0:
			return errTruncated
		case rest[0] == shut && len(bytes.TrimLeft(rest[1:], " \t\r\n")) == 0:
			return nil
		case rest[0] == shut:
			return errors.New("something follows its end")
		case !first && rest[0] != ',':
			return fmt.Errorf("want a comma, have %q", rest[:1])
		case !first:
			rest = bytes.TrimLeft(rest[1:], " \t\r\n")
		}
		var err error
		if rest, err = part(rest); err != nil {
			return err
		}
		rest = bytes.TrimLeft(rest, " \t\r\n")
	}
}

// endOf returns the length of the value that content begins with.
func endOf(content []byte) (int, error) {
	depth := 0
	for i := 0; i < len(content); i++ {
		switch content[i] {
		case '"':
			for i++; i < len(content) && content[i] != '"'; i++ {
				if content[i] == '\\' {
					i++
				}
			}
			if i >= len(content) {
				return 0, errTruncated
			}
			if depth == 0 {
				return i + 1, nil
			}
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				return i + 1, nil
			} else if depth < 0 {
				return wordEnd(i)
			}
		case ',', ' ', '\t', '\r', '\n':
			if depth == 0 {
				return wordEnd(i)
			}
		}
	}
	return 0, errTruncated
}

// wordEnd is the end of a number, or of a word.
func wordEnd(i int) (int, error) {
	if i == 0 {
		return 0, errors.New("a value is missing")
	}
	return i, nil
}
